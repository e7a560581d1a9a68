"""The launch of a script as the gang: what of srun's options goes where, and with what it ends."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.daemon.agent.batch.batch_process import RemoteCoordinator, ViewFailure
from muster.daemon.agent.user_script import gang_launch
from muster.daemon.agent.user_script.gang_launch import exit_code_of_ranks
from muster.daemon.agent.user_script.launch_rule import Kind
from muster.daemon.agent.user_script.own_nodes import divide
from muster.daemon.agent.user_script.script_job import ScriptJob
from muster.daemon.host import rank_log_files
from muster.daemon.host.process.step_signals import FOR_RANKS
from muster.slurm.client.launch_settings import LaunchSettings
from muster.slurm.client.srun_options import read_srun
from muster.v1.api_pb2 import GangView
from muster.v1.common_pb2 import JobSpec


@pytest.mark.parametrize(
    ("codes", "kind", "code"),
    [
        ([3], Kind.RANKS, 3),
        ([1, 85], Kind.RANKS, 85),
        ([1, -11], Kind.RANKS, 139),
        ([], Kind.RANKS, 93),
        ([3], Kind.LAUNCHER, 1),
    ],
    ids=["its own", "the highest, as srun", "a signal", "no rank has failed by itself", "as torchrun"],
)
def test_a_launch_whose_ranks_fail_again_and_again_ends_as_under_srun(codes: list[int], kind: Kind, code: int) -> None:
    assert exit_code_of_ranks(codes, kind) == code


def test_only_ranks_of_the_newest_generation_count(tmp_path: Path) -> None:
    run_dir = str(tmp_path)
    assert rank_log_files.failed_codes(run_dir, "g") == []
    for generation, rank, code in ((1, 0, 7), (2, 0, 3), (2, 1, -11)):
        for number in (0, 1, 2):
            rank_log_files.log_path(run_dir, "g", generation, number).parent.mkdir(parents=True, exist_ok=True)
            rank_log_files.log_path(run_dir, "g", generation, number).touch()
        rank_log_files.note_failed(run_dir, "g", generation, rank, code)
    assert sorted(rank_log_files.failed_codes(run_dir, "g")) == [-11, 3]


@pytest.fixture
def _signals() -> Iterator[None]:
    """The process that runs the tests keeps its own ways with signals."""
    kept = {number: signal.getsignal(number) for number in FOR_RANKS}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize(
    ("view", "waits_for"),
    [(GangView(phase="RUNNING"), "its ranks, which train on"), (ViewFailure.NO_ANSWER, "the coordinator")],
)
def test_a_call_in_the_place_of_a_killed_launch_says_what_it_waits_for(
    view: GangView | ViewFailure,
    waits_for: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    views = [view, GangView(phase="DONE", final=True)]

    async def answer(*_: object) -> GangView | ViewFailure:
        return views.pop(0)

    monkeypatch.setattr(RemoteCoordinator, "view", answer)
    (tmp_path / "secret").write_text("0" * 64)
    (tmp_path / "secret").chmod(0o600)
    monkeypatch.setenv("MUSTER_AUTH", f"secret:{tmp_path}/secret")
    monkeypatch.setenv("MUSTER_CONNECTIONS", "plain text, the network is trusted")
    settings = LaunchSettings("g", "127.0.0.1:1", "/bin/muster-agent", 0, JobSpec(run_dir=str(tmp_path)))
    job = ScriptJob(settings, "g", divide(["n0"], 0), 7, 0, (4,), 0)
    remote = gang_launch._remote(job, gang_launch.Site.load(coordinator="127.0.0.1:1"))
    call = gang_launch.script_job.describe(job, read_srun(["torchrun", "train.py"]))
    assert asyncio.run(gang_launch._after_kill(job, remote, call, 137)) == 0
    said = f"muster: line 4, srun torchrun train.py: it was killed, and waits for {waits_for}"
    assert said in capsys.readouterr().err
