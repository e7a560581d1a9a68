"""`muster run train.py`: whose options are which, and what starts torchrun."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from muster.launcher.commands import run as run_command
from muster.launcher.errors import SiteFault, WrongInput
from muster.launcher.scripts import in_allocation
from muster.launcher.scripts.torchrun_call import TorchrunCall, divide
from muster.slurm.client.parsing.queued_job import how_shared

PARSER = argparse.ArgumentParser()
run_command.COMMAND.arguments(PARSER)


@pytest.mark.parametrize(
    ("words", "mine", "options", "script"),
    [
        ("train.py --spares 3", "", "", "train.py --spares 3"),
        ("--nproc-per-node 2 --spares 1 train.py", "--spares 1", "--nproc-per-node 2", "train.py"),
        ("--spares=1 --nnodes=1:2 -m pkg.train -x", "--spares=1", "--nnodes=1:2 -m", "pkg.train -x"),
        (
            "--standalone --no-python -r3 -t 3 --fresh sh -c x",
            "--fresh",
            "--standalone --no-python -r3 -t 3",
            "sh -c x",
        ),
        ("--log-dir logs --role=a train.py", "--log-dir logs", "--role=a", "train.py"),
        ("--local --nodes 4 -- python x.py", "--local --nodes 4", "", "-- python x.py"),
        ("--help", "--help", "", ""),
        ("--nproc-per-node", "", "--nproc-per-node", ""),
    ],
)
def test_options_of_both_stand_before_the_script(words: str, mine: str, options: str, script: str) -> None:
    found, call = divide(words.split(), PARSER._option_string_actions)
    assert (found, call) == (mine.split(), TorchrunCall(tuple(options.split()), tuple(script.split())))


def test_the_command_says_on_how_many_nodes_unless_the_user_does(tmp_path: Path) -> None:
    (tmp_path / "torchrun").touch(mode=0o700)
    environ, torchrun = {"PATH": str(tmp_path)}, str(tmp_path / "torchrun")
    call = TorchrunCall(("--nproc-per-node=2",), ("train.py", "--nnodes"))
    assert call.command(3, environ) == [torchrun, "--nnodes=3", "--nproc-per-node=2", "train.py", "--nnodes"]
    said = TorchrunCall(("--nnodes=1:2",), ("train.py",))
    assert said.command(3, environ) == [torchrun, "--nnodes=1:2", "train.py"]
    assert call.command(3, {**environ, "PET_NNODES": "2"})[1] == "--nproc-per-node=2"
    if not (Path(sys.executable).parent / "torchrun").exists():
        with pytest.raises(SiteFault, match="torchrun is not on PATH"):
            call.command(1, {"PATH": "/none"})


def test_whose_job_it_is() -> None:
    of_slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-2]"}
    of_muster = {**of_slurm, "MUSTER_LAUNCH": "/x.launch.json", "MUSTER_SCRIPT_JOB": "7"}
    assert [in_allocation.is_here(environ) for environ in ({}, of_slurm)] == [False, True]
    known = [{}, of_slurm, of_muster, {**of_muster, "SLURM_JOB_ID": "8"}, {"MUSTER_TASK_SOCKET": "x"}]
    assert [in_allocation.is_known(environ) for environ in known] == [False, False, True, False, True]
    assert in_allocation.own_nodes(of_slurm, 1) == 2
    with pytest.raises(WrongInput, match="--spares 3: the job has 3 nodes"):
        in_allocation.own_nodes(of_slurm, 3)


@pytest.mark.parametrize(
    ("step", "is_task"), [("0", True), ("12", True), ("-5", False), ("4294967291", False), ("", False)]
)
def test_the_shell_of_a_job_is_no_task_of_srun(step: str, is_task: bool) -> None:
    assert in_allocation._is_task_of_srun({"SLURM_STEP_ID": step}) is is_task


async def test_launchers_of_several_hosts_do_not_meet_which_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torchrun").touch(mode=0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for option, said in (("--rdzv_endpoint=n0:29500", True), ("--rdzv-id=7", False)):
        _, call = divide([option, "train.py"], PARSER._option_string_actions)
        options = PARSER.parse_args(["--nodes=65", "--", "train.py"])
        options.call = call
        with pytest.raises(WrongInput, match="--nodes 65"):
            await run_command.COMMAND.run(options)
        assert ("this host trains alone" in capsys.readouterr().err) == said


def test_an_srun_in_front_of_it_is_said_to_be_too_much() -> None:
    words = "from muster.launcher.scripts import in_allocation as a; print(a.launch_for_all(['false'], {}, '7.0'))"
    done = subprocess.run(
        [sys.executable, "-c", words], env={}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "1\n", done.stderr
    assert "start muster run without srun" in done.stderr


@pytest.mark.parametrize(
    ("job", "how"),
    [
        ("OverSubscribe=OK Contiguous=0", "OverSubscribe=OK"),  # 24.11
        ("OverSubscribe=NO Contiguous=0", ""),
        ("OverSubscribe=NO Exclusive=NO Contiguous=0", "Exclusive=NO"),  # 26.05
        ("OverSubscribe=NO Exclusive=NODE Contiguous=0", ""),
    ],
)
def test_slurm_says_whether_other_jobs_may_run_on_the_nodes(job: str, how: str) -> None:
    assert how_shared(job) == how
