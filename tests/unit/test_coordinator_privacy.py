"""Where jobs or nodes are private, a user sees the nodes of their own jobs only: by PrivateData, or by the site."""

from pathlib import Path

import pytest

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.server import Coordinator, Settings
from muster.daemon.coordinator.slurm.roster import SlurmRoster
from muster.daemon.testing.chosen_users import ChosenUser
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.channel import open_channel
from muster.daemon.transport.site_config import Site, SiteError
from muster.slurm.client.parsing.start_text import private_data
from muster.slurm.client.types import Unknown
from muster.v1 import api_pb2, api_pb2_grpc

ALL = (*NODES, "n9")
SLURM, OPERATOR, OWNER, OTHER = 64030, 500, 1001, 1002


async def nodes_seen(world: ScriptedWorld, uid: int, *, site_hides_jobs: bool) -> list[str]:
    """The nodes that `muster nodes` shows to `uid`."""
    return [node.node for node in (await roll_call(world, uid, site_hides_jobs=site_hides_jobs)).nodes]


async def roll_call(world: ScriptedWorld, uid: int, *, site_hides_jobs: bool) -> api_pb2.NodesReply:
    """What `uid` is answered. OWNER has a job on all nodes but n9."""
    user = ChosenUser(SLURM)
    rights = Rights(frozenset({OPERATOR}), own_uid=SLURM)
    settings = Settings("127.0.0.1:0", world.folder, world.slurm, user, rights, private_jobs=site_hides_jobs)
    coordinator = await Coordinator.open(settings)
    await coordinator.start()
    coordinator.engine.post(events.GangSubmitted("g1", 1, OWNER, "train", events.GangSpec(2, 0), "{}"))
    coordinator.engine.post(events.SlurmJobChanged("g1", 1, NODES, 0, None))
    coordinator.engine.post(events.NodeAttached("n9", "boot", "i", "127.0.0.1:7071"))
    await coordinator.roster.refresh()
    await coordinator.roster.ask_what_is_private()
    async with open_channel(f"127.0.0.1:{coordinator.port}", user.as_uid(uid)) as channel:
        reply = await api_pb2_grpc.MusterStub(channel).Nodes(api_pb2.ListRequest())
    await coordinator.stop()
    return reply


@pytest.mark.parametrize(("by_slurm", "by_site"), [("jobs", False), ("usage,nodes", False), ("", True)])
@pytest.mark.parametrize(("uid", "seen"), [(OTHER, ()), (OWNER, NODES), (OPERATOR, ALL), (0, ALL)])
async def test_where_others_are_private_a_user_sees_the_nodes_of_their_own_jobs(
    tmp_path: Path, uid: int, seen: tuple[str, ...], by_slurm: str, by_site: bool
) -> None:
    world = ScriptedWorld.create(tmp_path, owner_uid=OWNER)
    world.slurm.private = frozenset(by_slurm.split(","))
    assert await nodes_seen(world, uid, site_hides_jobs=by_site) == list(seen)


async def test_where_nothing_is_private_every_user_sees_all_nodes(tmp_path: Path) -> None:
    world = ScriptedWorld.create(tmp_path, owner_uid=OWNER)
    world.slurm.private = frozenset({"accounts"})
    assert await nodes_seen(world, OTHER, site_hides_jobs=False) == list(ALL)


async def test_until_slurm_has_said_what_is_private_jobs_are(tmp_path: Path) -> None:
    world = ScriptedWorld.create(tmp_path, owner_uid=OWNER)
    world.slurm.unavailable_reason = "slurmctld is away"
    assert await nodes_seen(world, OTHER, site_hides_jobs=False) == []


@pytest.mark.parametrize(("by_site", "words"), [(False, "no PrivateData"), (True, "")])
@pytest.mark.parametrize("uid", [OTHER, OPERATOR])
async def test_users_and_operators_are_told_why_nodes_are_hidden(
    tmp_path: Path, uid: int, by_site: bool, words: str
) -> None:
    world = ScriptedWorld.create(tmp_path, owner_uid=OWNER)
    world.slurm.private = Unknown("no PrivateData")
    assert (await roll_call(world, uid, site_hides_jobs=by_site)).private_unknown == words


async def test_what_is_private_and_cannot_be_read_is_said_and_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slurm = ScriptedWorld.create(tmp_path).slurm
    slurm.private = Unknown("no PrivateData")
    roster = SlurmRoster(slurm)
    await roster.refresh()
    for _ in range(2):
        await roster.ask_what_is_private()
    assert (roster.hides_nodes, roster.private_unknown) == (True, "no PrivateData")
    assert [record.getMessage() for record in caplog.records] == [
        "can't read PrivateData in Slurm's configuration: no PrivateData; users see the nodes of their own jobs only"
    ]
    slurm.private = frozenset()
    await roster.ask_what_is_private()
    assert (roster.hides_nodes, roster.private_unknown) == (False, "")
    slurm.private = Unknown("no PrivateData")
    await roster.ask_what_is_private()
    assert (roster.hides_nodes, roster.private_unknown) == (False, "")
    assert caplog.records[-1].getMessage().endswith("; the last answer counts")


async def test_while_slurm_is_down_one_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slurm = ScriptedWorld.create(tmp_path).slurm
    slurm.unavailable_reason = "slurmctld is away"
    roster = SlurmRoster(slurm)
    await roster.refresh()
    await roster.ask_what_is_private()
    assert [record.getMessage() for record in caplog.records] == [
        "can't get the list of nodes from Slurm: slurmctld is away"
    ]


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
