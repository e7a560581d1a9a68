"""Where jobs are private, a user sees the nodes of their own jobs only: by PrivateData, or by the site's own word."""

from pathlib import Path

import pytest

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.server import Coordinator, Settings
from muster.daemon.coordinator.testing.scripted_world import NODES, ScriptedWorld
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.channel import open_channel
from muster.daemon.transport.site_config import Site, SiteError
from muster.daemon.transport.testing.chosen_users import ChosenUser
from muster.slurm.client.parsing.start_text import private_data
from muster.v1 import api_pb2, api_pb2_grpc

ALL = (*NODES, "n9")
SLURM, OPERATOR, OWNER, OTHER = 64030, 500, 1001, 1002


async def nodes_seen(world: ScriptedWorld, uid: int, *, site_hides_jobs: bool) -> list[str]:
    """What `muster nodes` shows to `uid`. OWNER has a job on all nodes but n9."""
    user = ChosenUser(SLURM)
    rights = Rights(frozenset({OPERATOR}), own_uid=SLURM)
    settings = Settings("127.0.0.1:0", world.folder, world.slurm, user, rights, private_jobs=site_hides_jobs)
    coordinator = await Coordinator.open(settings)
    await coordinator.start()
    coordinator.engine.post(events.GangSubmitted("g1", 1, OWNER, "train", events.GangSpec(2, 0), "{}"))
    coordinator.engine.post(events.SlurmJobChanged("g1", 1, NODES, 0, None))
    coordinator.engine.post(events.NodeAttached("n9", "boot", "i", "127.0.0.1:7071"))
    await coordinator.roster.refresh()
    async with open_channel(f"127.0.0.1:{coordinator.port}", user.as_uid(uid)) as channel:
        reply = await api_pb2_grpc.MusterStub(channel).Nodes(api_pb2.ListRequest())
    await coordinator.stop()
    return [node.node for node in reply.nodes]


@pytest.mark.parametrize(("by_slurm", "by_site"), [(True, False), (False, True)])
@pytest.mark.parametrize(("uid", "seen"), [(OTHER, ()), (OWNER, NODES), (OPERATOR, ALL), (0, ALL)])
async def test_where_jobs_are_private_a_user_sees_the_nodes_of_their_own_jobs(
    tmp_path: Path, uid: int, seen: tuple[str, ...], by_slurm: bool, by_site: bool
) -> None:
    world = ScriptedWorld.create(tmp_path, owner_uid=OWNER)
    world.slurm.private = frozenset({"jobs"} if by_slurm else ())
    assert await nodes_seen(world, uid, site_hides_jobs=by_site) == list(seen)


async def test_where_nothing_is_private_every_user_sees_all_nodes(tmp_path: Path) -> None:
    world = ScriptedWorld.create(tmp_path, owner_uid=OWNER)
    world.slurm.private = frozenset({"accounts"})
    assert await nodes_seen(world, OTHER, site_hides_jobs=False) == list(ALL)


async def test_until_slurm_has_said_what_is_private_jobs_are(tmp_path: Path) -> None:
    world = ScriptedWorld.create(tmp_path, owner_uid=OWNER)
    world.slurm.unavailable_reason = "slurmctld is away"
    assert await nodes_seen(world, OTHER, site_hides_jobs=False) == []


def test_what_slurm_calls_private_is_read_from_its_configuration() -> None:
    config = "PluginDir               = /usr/lib64/slurm\nPrivateData             = {}\nProctrackType = x\n"
    assert private_data(config.format("jobs,usage")) == {"jobs", "usage"}
    assert private_data(config.format("none")) == frozenset()
    with pytest.raises(ValueError, match="no PrivateData"):
        private_data("slurm_load_ctl_conf error")


def test_the_site_says_it_in_its_settings(tmp_path: Path) -> None:
    config = tmp_path / "muster.toml"
    config.write_text('privacy = "jobs"\n')
    assert Site.load(config=config, calls_coordinator=False).privacy == "jobs"
    config.write_text('privacy = "nodes"\n')
    with pytest.raises(SiteError, match='must be "slurm" or "jobs"'):
        Site.load(config=config, calls_coordinator=False)
