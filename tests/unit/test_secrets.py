"""A job's [env] may be secret: it is in private files, and in no log, event, view or argument."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.daemon.agent.pool_jobs import PoolRequestDefaults, PoolRequests
from muster.daemon.coordinator.core.state import facts
from muster.daemon.host import private_file
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld
from muster.daemon.transport.channel import open_channel
from muster.launcher.command import load_site
from muster.launcher.commands.submit import prepare, submit
from muster.launcher.main import parser
from muster.launcher.submission.registration import Registration
from muster.slurm.client.batch_script import PoolJob
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm
from muster.v1 import api_pb2, api_pb2_grpc
from muster.v1.agent_pb2 import PoolRequest
from muster.v1.common_pb2 import JobSpec

SECRET = "hf_s3cr3t-t0k3n"
JOB = f"""
name = "tiny"
nodes = 2
command = ["python3", "train.py"]
run_dir = "{{run_dir}}"
[env]
TOKEN = "{SECRET}"
"""


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def open_umask() -> Iterator[None]:
    """A user whose umask hides nothing."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_a_private_file_is_its_owners_from_the_start(tmp_path: Path) -> None:
    private_file.create(tmp_path / "script", "text")
    assert (_mode(tmp_path / "script"), (tmp_path / "script").read_text()) == (0o600, "text")


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_a_private_file_is_never_written_into_what_is_there(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "script", tmp_path / "other"
    if kind != "dangling link":
        other.write_text("of somebody")
    if kind == "file":
        path.write_text("of somebody")
    else:
        path.symlink_to(other)
    with pytest.raises(FileExistsError):
        private_file.create(path, "text")
    private_file.replace(path, "text")
    assert (path.read_text(), path.is_symlink(), _mode(path)) == ("text", False, 0o600)
    assert other.exists() == (kind != "dangling link")
    assert kind == "dangling link" or kind == "file" or other.read_text() == "of somebody"


@pytest.mark.usefixtures("open_umask")
async def test_the_submitted_script_is_private_and_queued(tmp_path: Path) -> None:
    world = ScriptedWorld.create(tmp_path)
    await world.start_coordinator()
    (tmp_path / "job.toml").write_text(JOB.format(run_dir=tmp_path / "run"))
    words = [
        "submit",
        "--coordinator",
        world.address,
        "--auth",
        f"secret:{tmp_path}/secret",
        str(tmp_path / "job.toml"),
    ]
    options = parser().parse_args(words)
    site = load_site(options)
    submission = prepare(options, site)
    async with Registration(site) as registration:
        job = await submit(submission, options, world.slurm, registration)
    (script,) = (tmp_path / "run").iterdir()
    await world.close()
    assert job in world.cluster.jobs()
    assert SECRET in script.read_text()
    assert _mode(script) == 0o600


@pytest.mark.usefixtures("open_umask")
async def test_the_script_of_a_pool_job_is_private_and_follows_no_link(tmp_path: Path) -> None:
    spec = JobSpec(name="tiny", run_dir=str(tmp_path), env={"TOKEN": SECRET})
    slurm = FakeSlurm(FakeCluster(("n1",), now=lambda: 1.0))
    pool = PoolRequests(PoolRequestDefaults(PoolJob("tiny-0a", spec, restarts=0), None, {}), slurm, lambda: None)
    script, victim = tmp_path / "tiny-0a-pool1.sbatch", tmp_path / "victim"
    victim.write_text("precious")
    script.symlink_to(victim)  # by another user of a shared run folder
    (request,) = pool.new_requests([PoolRequest(serial=1)])
    await pool.submit(request)
    (answer,) = pool.answers()
    assert (answer.error, victim.read_text()) == ("", "precious")
    assert (_mode(script), script.is_symlink()) == (0o600, False)
    assert SECRET in script.read_text()


async def test_the_environment_is_in_no_log_event_or_view(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="muster")
    world = ScriptedWorld.create(tmp_path)
    await world.start_coordinator()
    await world.start_agents(NODES, env={"TOKEN": SECRET})
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    await world.wait_for_facts(facts.GenerationStarted)
    async with open_channel(world.address, world.credentials) as channel:
        api = api_pb2_grpc.MusterStub(channel)
        ref = api_pb2.GangRef(slurm_job_id=1)
        records = [record async for record in api.Events(api_pb2.EventsRequest(gang=ref))]  # type: ignore[attr-defined]
        view = await api.Describe(ref)  # type: ignore[misc]
        nodes = await api.Nodes(api_pb2.ListRequest())  # type: ignore[misc]
    files = [path for path in world.folder.iterdir() if path.is_file()]
    assert any(SECRET.encode() in path.read_bytes() for path in files), "the journal has it"
    assert {_mode(path) for path in files} == {0o600}
    assert _mode(world.folder) == 0o700
    await world.close()
    assert any(record.name == "GangRegistered" for record in records)
    assert SECRET not in "".join(map(str, [*records, view, nodes]))
    assert SECRET not in caplog.text
