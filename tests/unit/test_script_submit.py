"""`muster submit SCRIPT` with an sbatch that only notes what it gets, and what bash reads before a script."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from muster.daemon.testing.scripted_world import ScriptedWorld
from muster.launcher.errors import WrongInput
from muster.launcher.main import main, parser
from muster.launcher.scripts import bash_env
from muster.launcher.scripts.call import ScriptCall
from muster.launcher.scripts.plan import Looked, look_over, settle
from muster.launcher.scripts.user_script import UserScript
from muster.launcher.submission import path_checks
from muster.slurm.client import launch_settings
from muster.slurm.client.backends import run_command
from muster.slurm.client.backends.run_command import run_for_caller
from muster.slurm.client.parsing.sbatch_request import JobRequest

SBATCH = """#!/bin/bash
printf '%s\\0' "$@" > "$NOTED/argv"
env -0 > "$NOTED/env"
if [ -n "$READS" ]; then cat > "$NOTED/stdin"; fi
if [ -n "$REFUSES" ]; then echo "sbatch: error: $REFUSES" >&2; exit 1; fi
for word in "$@"; do if [ "$word" = --parsable ]; then echo "42$CLUSTER"; exit; fi; done
echo "Submitted batch job 42"
"""
TRAIN = "#!/bin/bash\n#SBATCH --nodes=4 --ntasks=4\nhostname\nsrun torchrun train.py\n"


@dataclass
class Shell:
    """A shell in a folder of its own."""

    folder: Path
    capture: pytest.CaptureFixture[str]

    def submit(self, *words: str) -> tuple[int, str, str]:
        """Exit status, output and errors of one call."""
        self.capture.readouterr()
        site = ["--coordinator", "127.0.0.1:1", "--auth", f"secret:{self.folder}/secret", "--connections"]
        try:
            status = main(["submit", *site, "plain text, the network is trusted", *words])
        except SystemExit as ended:
            status = int(ended.code or 0)
        seen = self.capture.readouterr()
        return status, seen.out, seen.err

    def noted(self, name: str) -> list[str]:
        """What sbatch has got: argv or env. Empty: it was not called."""
        path = self.folder / "noted" / name
        return path.read_text(errors="surrogateescape").split("\0")[:-1] if path.exists() else []

    def variable(self, name: str) -> str | None:
        """A variable of sbatch."""
        return dict(one.partition("=")[::2] for one in self.noted("env")).get(name)

    def left(self) -> list[str]:
        """The files of jobs."""
        return sorted(path.suffix for path in self.folder.glob("muster-runs/*"))


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Shell:
    """A shell on shared storage, whose PATH has an sbatch and Muster."""
    for name in ("bin", "noted", "home"):
        (tmp_path / name).mkdir()
    for name, text, mode in (("bin/sbatch", SBATCH, 0o755), ("secret", "0123456789abcdef" * 4, 0o600)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    (tmp_path / "train.sbatch").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("NOTED", str(tmp_path / "noted"))
    monkeypatch.setenv("MUSTER_RUNS", str(tmp_path / "home"))
    for name in ("BASH_ENV", "SLURM_JOB_ID", *(name for name in os.environ if name.startswith("SBATCH_"))):
        monkeypatch.delenv(name, raising=False)
    mounts = tmp_path / "mounts"
    mounts.write_text(f"filer:/home {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr(path_checks, "MOUNTS", mounts)
    return Shell(tmp_path, capfd)


def test_the_users_own_file_is_queued_with_what_is_added(shell: Shell) -> None:
    status, out, err = shell.submit("--force", "--spares", "1", "-p", "big", "train.sbatch", "a", "--lr=1")
    assert (status, out) == (0, "Submitted batch job 42\n")
    assert shell.noted("argv") == [
        *(
            "-p",
            "big",
            "--nodes=5",
            "--ntasks=5",
            "--no-kill",
            "--exclusive",
            "--parsable",
            "train.sbatch",
            "a",
            "--lr=1",
        )
    ]
    assert "muster: line 4 becomes the gang: srun torchrun train.py\n" in err
    assert "job 42 (4 nodes and 1 spare)" in err
    assert shell.left() == [".json", ".sh"]
    named = shell.variable("BASH_ENV") or ""
    settings = launch_settings.read(Path(named.replace(".bash_env.sh", ".launch.json")).read_text())
    assert (settings.spares, settings.spec.spares, settings.spec.nodes) == (1, 1, 0)
    assert settings.launch
    assert settings.launch.words == ("srun", "torchrun", "train.py")
    assert settings.spec.work_dir == str(shell.folder)
    assert {
        Path(named).stat().st_mode & 0o777,
        Path(named.replace(".bash_env.sh", ".launch.json")).stat().st_mode & 0o777,
    } == {0o600}


@pytest.mark.parametrize(
    ("options", "seconds", "number"),
    [
        ((), 0, 0),
        (("--durable-dir=/shared/checkpoints",), 120, 0),
        (("--durable-dir=/shared/checkpoints", "--signal=B:USR1@60"), 0, 0),
        (("--signal=USR1@60", "--stop-before=30"), 30, 0),
        (("--signal=B:TERM@60",), 0, 0),
        (("--signal=TERM@90",), 150, signal.SIGTERM),
        (("--signal=15", "--stop-signal=USR2"), 120, signal.SIGUSR2),
        (("--signal=SIGTERM@90", "--stop-before=0"), 0, 0),
        (("--stop-signal=USR1",), 120, signal.SIGUSR1),
        (("--requeue-at-limit",), 120, 0),
    ],
)
def test_a_script_trains_to_its_time_limit_unless_an_earlier_stop_saves_something(
    options: tuple[str, ...], seconds: int, number: int, shell: Shell
) -> None:
    """If it asks Slurm for a signal before its end, no stop of Muster's own comes first, and ranks get one signal.
    Before Slurm's SIGTERM there is a stop: at SIGTERM the job would be requeued."""
    shell.submit("--force", *options, "train.sbatch")
    settings = launch_settings.read(next(shell.folder.rglob("*.launch.json")).read_text())
    assert (settings.spec.stop_before_s, settings.spec.stop_signal) == (seconds, number)


@pytest.mark.parametrize(
    ("options", "launch", "ranks"),
    [
        ("--ntasks-per-node=1", "torchrun --nproc_per_node 8", 8),
        ("--ntasks-per-node=1 --gpus-per-node=a100:8", "torchrun --nproc-per-node=$N", 8),
        ("--gres=shard:2,gpu:a100:8", "torchrun", 8),
        ("--ntasks-per-node=1 --gres=gpu", "torchrun", 0),
        ("--gpus-per-node=8", "torchrun --nproc-per-node=1", 0),
        ("--ntasks=16", "python", 8),
        ("--ntasks-per-node=4 --gpus-per-node=8", "--ntasks-per-node=8 python", 8),
        ("--gpus-per-node=4", "-n 16 python", 8),
        ("--gpus-per-node=8", "--ntasks-per-node=1 python", 0),
        ("--ntasks-per-node=1 --gpus-per-node=8", "--ntasks-per-node=$N python", 8),
    ],
)
def test_degrees_of_parallelism_are_checked_for_the_ranks_that_a_script_names(
    options: str, launch: str, ranks: int, shell: Shell
) -> None:
    text = f"#!/bin/bash\n#SBATCH -N 2 {options}\n#MUSTER --tensor=8 --elastic\nsrun {launch} train.py\n"
    (shell.folder / "train.sbatch").write_text(text)
    status, _, err = shell.submit("--force", "train.sbatch")
    assert status == (0 if ranks else 64), err
    assert "not supervised" not in err
    assert ("say with --ranks-per-node=N how many ranks" in err) == (not ranks)


def test_a_record_of_the_run_is_kept(shell: Shell) -> None:
    shell.submit("--force", "--wrap", "srun torchrun train.py", "--comment", "two\nlines")
    [record] = (json.loads(path.read_text()) for path in (shell.folder / "home").rglob("*.json"))
    assert (record["slurm_job_id"], record["name"], record["spec"]["command"]) == (42, "wrap", ["wrap"])


def test_a_quiet_job_is_known(shell: Shell) -> None:
    """sbatch itself would print no number then, not even with --parsable."""
    status, out, err = shell.submit("--force", "-Q", "-p", "big", "train.sbatch")
    assert (status, out, "becomes the gang" in err) == (0, "", False)
    assert shell.noted("argv")[:2] == ["--partition=big", "--no-kill"]
    assert len(list((shell.folder / "home").rglob("*.json"))) == 1


def test_quiet_in_a_line_of_the_script_silences_nothing(shell: Shell) -> None:
    """As sbatch, which reads it too late."""
    (shell.folder / "train.sbatch").write_text("#!/bin/bash\n#SBATCH -N 2 --quiet\nsrun torchrun train.py\n")
    status, out, err = shell.submit("--force", "train.sbatch")
    assert (status, out, "becomes the gang" in err, "Watch it" in err) == (0, "Submitted batch job 42\n", True, True)


def test_without_a_coordinator_nothing_is_queued(shell: Shell) -> None:
    status, out, err = shell.submit("train.sbatch")
    assert (status, out, shell.noted("argv"), shell.left()) == (69, "", [], [])
    assert "With --force the job is queued" in err


def test_words_and_status_of_sbatch_are_kept(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSES", "Batch job submission failed: Invalid account")
    status, out, err = shell.submit("--force", "train.sbatch")
    assert (status, out, shell.left()) == (1, "", [])
    assert "sbatch: error: Batch job submission failed: Invalid account\n" in err
    assert "muster: nothing was queued: sacctmgr show assoc user=$USER" in err


def test_a_limit_that_holds_the_job_back_or_refuses_it_is_said_with_its_spares(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = shell.folder / "bin/scontrol"
    scontrol.write_text("#!/bin/sh\necho JobId=42 Reason=QOSMaxNodePerJobLimit\n")
    scontrol.chmod(0o755)
    err = shell.submit("--force", "--spares", "1", "train.sbatch")[2]
    asks = "asks for 5 nodes, 4 to train on and 1 spare"
    assert f"the limit QOSMaxNodePerJobLimit holds back job 42, which {asks}: muster status 42 says" in err
    monkeypatch.setenv("REFUSES", "QOSMaxNodePerJobLimit")
    err = shell.submit("--force", "--spares", "1", "train.sbatch")[2]
    assert f"muster: nothing was queued: it {asks}\n" in err


@pytest.mark.parametrize(
    ("words", "cluster", "out"),
    [
        (["--parsable"], "", "42\n"),
        (["--parsable"], ";one", "42;one\n"),
        ([], ";one", "Submitted batch job 42 on cluster one\n"),
        (["-Q"], "", ""),
        (["--wait"], "", "Submitted batch job 42\n"),
    ],
)
def test_the_answer_is_printed_as_sbatch_prints_it(
    words: list[str], cluster: str, out: str, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTER", cluster)
    assert shell.submit("--force", *words, "train.sbatch")[1] == out


def test_the_answer_as_json(shell: Shell) -> None:
    told = json.loads(shell.submit("--force", "--json", "train.sbatch")[1])
    assert (told["slurm_job_id"], told["script"]) == (42, "train.sbatch")


def test_a_trial_queues_nothing(shell: Shell) -> None:
    status, out, _ = shell.submit("--dry-run", "--spares=1", "train.sbatch")
    assert (status, shell.noted("argv"), shell.left()) == (0, [], [])
    assert "+ --nodes=5  (in place of line 2: --nodes=4)\n" in out
    assert "+ --no-kill  (the job outlives a lost node)\n" in out
    shell.submit("--test-only", "--spares=1", "train.sbatch")
    assert shell.noted("argv")[:3] == ["--test-only", "--nodes=5", "--ntasks=5"]
    assert (shell.left(), shell.variable("BASH_ENV")) == ([], None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("#!/bin/sh\n#SBATCH -N 2\nsrun torchrun train.py\n", "line 1: /bin/sh runs the script"),
        ("#!/usr/bin/env python3\nimport os\n", "line 1: python3 runs the script"),
        ("#!/bin/bash -p\nsrun torchrun train.py\n", "line 1: bash -p reads no BASH_ENV"),
        ("#!/bin/bash\nmpirun train\n", "line 2: mpirun"),
        ("#!/bin/bash\n#SBATCH --container-image=a.sqsh\nsrun torchrun a.py\n", "line 2: --container-image=a.sqsh"),
        ("#!/bin/bash\n#SBATCH --export=NIL\nsrun torchrun a.py\n", "--export=NIL"),
    ],
)
def test_what_can_not_be_supervised_is_queued_as_it_is(text: str, says: str, shell: Shell) -> None:
    (shell.folder / "train.sbatch").write_text(text)
    status, out, err = shell.submit("-N", "2", "--spares", "1", "train.sbatch", "a")
    assert (status, out) == (0, "Submitted batch job 42\n")
    assert shell.noted("argv") == ["-N", "2", "train.sbatch", "a"]
    assert f"muster: this job is not supervised, and has no spares: {says}" in " ".join(err.split())
    assert (shell.left(), shell.variable("BASH_ENV")) == ([], None)


@pytest.mark.parametrize("data", [b"", b"\x7fELF\0\1", b"#!/bin/bash\r\nsrun torchrun a\r\n", b"hostname\n", None])
def test_what_sbatch_refuses_gets_its_own_words(data: bytes | None, shell: Shell) -> None:
    path = shell.folder / "train.sbatch"
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
    assert shell.submit("--spares=1", "train.sbatch")[0] == 0  # this sbatch refuses nothing
    assert shell.noted("argv") == ["train.sbatch"]


def test_a_script_that_is_too_large_is_left_to_sbatch(shell: Shell) -> None:
    (shell.folder / "train.sbatch").write_text(TRAIN + "# more\n" * (10 << 20 >> 3))
    shell.submit("--spares=1", "train.sbatch")
    assert shell.noted("argv") == ["train.sbatch"]


def test_a_trial_of_a_script_that_is_left_to_sbatch_queues_nothing(shell: Shell) -> None:
    (shell.folder / "train.sbatch").write_bytes(b"#!/bin/bash\r\nsrun torchrun a\r\n")
    shell.submit("--dry-run", "train.sbatch")
    assert shell.noted("argv") == ["--test-only", "train.sbatch"]


def test_a_folder_that_is_gone_is_said(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    (shell.folder / "gone").mkdir()
    monkeypatch.chdir(shell.folder / "gone")
    (shell.folder / "gone").rmdir()
    status, out, err = shell.submit("--force", str(shell.folder / "train.sbatch"))
    assert (status, out, shell.noted("argv")) == (64, "", [])
    assert err.startswith("muster: the folder of this shell has been removed\n")


async def test_a_question_of_sbatch_is_seen_and_a_long_line_is_passed_on(tmp_path: Path) -> None:
    """A wrapper asks for a password, and then says much in one line."""
    script = "printf 'Password: ' >&2; until [ -e seen ]; do sleep 0.01; done; head -c 100000 /dev/zero >&2; echo 7"
    said, lines = list[bytes](), list[str]()

    def take(chunk: bytes) -> None:
        said.append(chunk)
        (tmp_path / "seen").touch()

    argv = ["sh", "-c", f"cd {tmp_path}; {script}"]
    assert await run_for_caller(argv, env=os.environ, given=b"", on_line=lines.append, on_error=take) == 0
    assert lines == ["7\n"]
    assert b"".join(said) == b"Password: " + bytes(100_000)


async def test_what_a_wrapper_of_sbatch_writes_through_a_process_of_its_own_comes_after_its_end(tmp_path: Path) -> None:
    """As with bash's `exec > >(tee log)`. Here the process that passes it on waits for the wrapper's end."""
    os.mkfifo(tmp_path / "ended")
    script = "(cat <ended; head -c 1000000 /dev/zero >&2; echo 7) & exec 3>ended"
    said, lines = list[bytes](), list[str]()
    argv = ["sh", "-c", f"cd {tmp_path}; {script}"]
    assert await run_for_caller(argv, env=os.environ, given=b"", on_line=lines.append, on_error=said.append) == 0
    assert lines == ["7\n"]
    assert len(b"".join(said)) == 1_000_000


async def test_an_error_of_whoever_takes_the_output_is_not_lost() -> None:
    def refuse(chunk: bytes) -> None:
        raise BlockingIOError(chunk)

    output = run_command._Output(refuse)
    os.write(output.target, b"7")
    ended = asyncio.get_running_loop().create_future()
    ended.set_result(0)
    with pytest.raises(BlockingIOError, match="7"):
        await output.pass_on(ended)


async def test_nobody_waits_for_what_a_wrapper_of_sbatch_leaves_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the wrapper's output open. What the wrapper has written last is passed on all the same."""
    monkeypatch.setattr(run_command, "_LAST_OUTPUT_S", 0.01)
    os.mkfifo(tmp_path / "held")
    script = "(read line <held) & head -c 50000 /dev/zero >&2; echo 7; printf end"
    said, lines = list[bytes](), list[str]()
    argv = ["sh", "-c", f"cd {tmp_path}; {script}"]
    assert await run_for_caller(argv, env=os.environ, given=b"", on_line=lines.append, on_error=said.append) == 0
    (tmp_path / "held").write_text("ends the process that was left behind\n")
    assert lines == ["7\n", "end"]
    assert b"".join(said) == bytes(50_000)


def test_words_that_are_no_utf_8(shell: Shell) -> None:
    """They go to the script. In what Muster itself has to know, they are refused."""
    assert shell.submit("--force", "train.sbatch", "caf\udce9")[0] == 0
    assert shell.noted("argv")[-1] == "caf\udce9"
    status, _, err = shell.submit("--force", "--run-dir=/caf\udce9", "train.sbatch")
    assert (status, err.splitlines()[-2:]) == (64, [r"muster: '/caf\udce9' is no UTF-8", "  Nothing was queued"])


def test_the_count_of_restarts_of_another_job_does_not_reach_this_one(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    shell.submit("--force", "train.sbatch")
    assert shell.variable("SLURM_RESTART_COUNT") is None


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("#SBATCH --nodes=2-8", "line 2: --nodes=2-8 lets Slurm choose"),
        ("#SBATCH -N 2\n#SBATCH hetjob", "line 3: hetjob"),
        ("#SBATCH --comment='a", "line 2: the quote ' is not closed"),
        ("#SBATCH nodes=2", "line 2: 'nodes=2' is no option of sbatch"),
        ("#MUSTER --spars=1", "line 2: there is no key '--spars=1'"),
        ("#MUSTER --launch-line=9", "--launch-line=9: no command begins there"),
        ("#MUSTER --launch-line=x", "--launch-line=x must be the number of a line"),
        ("#MUSTER --spares=-1", "line 2: spares = -1: must be 0 or more"),
        ("\n#MUSTER --checkpoint.copies=x", "line 3: checkpoint.copies = 'x': must be a whole number"),
        ("#SBATCH -n 8\n#MUSTER --spares=1", "line 2: --ntasks=8 without --nodes"),
    ],
)
def test_what_is_wrong_is_said_once_and_nothing_is_queued(lines: str, says: str, shell: Shell) -> None:
    (shell.folder / "train.sbatch").write_text(f"#!/bin/bash\n{lines}\nsrun torchrun train.py\n")
    status, out, err = shell.submit("--force", "train.sbatch")
    assert (status, out, shell.noted("argv"), shell.left()) == (64, "", [], [])
    assert says in " ".join(err.split())
    assert err.count("Nothing was queued") == 1


def test_a_script_on_standard_input(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READS", "1")
    with (shell.folder / "train.sbatch").open() as script:
        monkeypatch.setattr(sys, "stdin", script)
        shell.submit("--force", "--spares=1")
    assert shell.noted("argv") == ["--nodes=5", "--ntasks=5", "--no-kill", "--exclusive", "--parsable"]
    assert (shell.folder / "noted" / "stdin").read_text() == TRAIN


def test_a_script_in_a_pipe_is_read_once(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `muster submit <(sed ... train.sbatch) a`."""
    monkeypatch.setenv("READS", "1")
    reads, writes = os.pipe()
    os.write(writes, TRAIN.encode())
    os.close(writes)
    shell.submit("--force", f"/dev/fd/{reads}", "a")
    os.close(reads)
    assert shell.noted("argv")[-2:] == ["/dev/stdin", "a"]
    assert (shell.folder / "noted" / "stdin").read_text() == TRAIN


def test_a_wrapped_command_becomes_a_script_of_bash(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READS", "1")
    shell.submit("--force", "-N2", "--wrap", "srun torchrun train.py", "--spares=1")
    assert shell.noted("argv") == [
        *("--nodes=2", "--nodes=3", "--job-name=wrap", "--no-kill", "--exclusive", "--parsable")
    ]
    text = (shell.folder / "noted" / "stdin").read_text()
    assert text == "#!/bin/bash\n# This script was created by sbatch --wrap.\n\nsrun torchrun train.py\n\n"


def test_a_wrapped_command_that_is_no_training_is_left_alone(shell: Shell) -> None:
    shell.submit("--wrap", "hostname")
    assert shell.noted("argv") == ["--wrap", "hostname"]


def test_variables_of_sbatch_are_followed(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SBATCH_EXPORT", "NONE"), ("SBATCH_EXCLUSIVE", "user"), ("SBATCH_GPUS", "8")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("BASH_ENV", "/site/init.sh")
    _, _, err = shell.submit("--force", "--spares=1", "train.sbatch")
    grown = ["--nodes=5", "--ntasks=5", "--gpus=10", "--gpus-per-node=2"]
    assert shell.noted("argv")[:6] == [*grown, "--no-kill", "--exclusive"]
    assert "--export=BASH_ENV" in shell.noted("argv")
    assert "SBATCH_EXCLUSIVE of this shell: --exclusive=user is overridden" in err
    text = Path(shell.variable("BASH_ENV") or "").read_text()
    assert "export SLURM_EXPORT_ENV=NONE" in text
    assert "unset BASH_ENV" in text  # under sbatch the script would not see it


def test_variables_send_no_job_to_another_cluster(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", "other")
    status, _, err = shell.submit("--force", "train.sbatch")
    assert (status, shell.noted("argv")) == (64, [])
    assert "SLURM_CLUSTERS of this shell" in err


def test_a_trial_says_what_would_be_refused(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_checks, "MOUNTS", shell.folder / "none")
    (shell.folder / "none").touch()
    words = f"run_dir = '{shell.folder}/muster-runs' is local to each host"
    status, out, err = shell.submit("--dry-run", "train.sbatch")
    assert (status, f"muster: on this host the job would be refused: {words}" in err) == (0, True)
    status, out, err = shell.submit("--force", "train.sbatch")
    assert (status, out, words in err) == (64, "", True)


def test_another_training_beside_the_launch_is_said(shell: Shell) -> None:
    text = TRAIN.replace("srun torchrun train.py", "srun python train.py\nsrun python eval.py")
    (shell.folder / "train.sbatch").write_text(text)
    err = shell.submit("--force", "--array=3-5", "train.sbatch")[2]
    assert (
        "muster: line 5 starts as many tasks of Python, and is not supervised: --launch-line=5 makes it the gang" in err
    )
    assert "Watch task 3, once it runs: muster status -f 42_3" in err


def test_options_behind_the_script_are_said_to_be_its_arguments(shell: Shell) -> None:
    _, out, err = shell.submit("--force", "train.sbatch", "--spares=1", "--lr", "1")
    assert err.count("stands behind train.sbatch, so the script gets it") == 1
    assert (shell.noted("argv")[-3:], out) == (["--spares=1", "--lr", "1"], "Submitted batch job 42\n")


@pytest.mark.parametrize("option", ["--force", "--dry-run", "--test-only"])
def test_a_missing_folder_of_the_output_is_said(shell: Shell, option: str) -> None:
    script = TRAIN.replace("hostname", "#SBATCH -o logs/%x.out -e logs/%x.err")
    (shell.folder / "train.sbatch").write_text(script)
    status, _, err = shell.submit(option, "train.sbatch")
    assert (status, err.count(f"the folder {shell.folder}/logs does not exist")) == (0, 1)


def test_a_job_that_submits_a_job_leaves_nothing_of_its_own(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"/run/x.bin:{path}")
    own = {
        "MUSTER_LAUNCH": "/run/x.launch.json",
        "MUSTER_GANG": "x",
        "MUSTER_SHELL": "7",
        "BASH_FUNC_srun%%": "() { :; }",
    }
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    shell.submit("--force", "train.sbatch")
    assert [shell.variable(name) for name in own] == [None] * 4
    assert shell.variable("PATH") == path


@pytest.mark.parametrize("at_start", [{}, {"GRPC_VERBOSITY": "INFO"}])
def test_a_job_gets_the_variables_of_grpc_that_the_user_has_set(at_start: dict[str, str]) -> None:
    by_this_process = {"GRPC_VERBOSITY": "NONE", "GRPC_SSL_CIPHER_SUITES": "ECDHE-PSK-AES128-CBC-SHA"}
    assert bash_env.environment({"A": "1", **by_this_process}, at_start) == {"A": "1", **at_start}


@pytest.mark.parametrize("flags", ["", "-u", "-x", "-e", "-eux"])
def test_bash_reads_what_is_added_and_goes_on_as_it_would(flags: str, tmp_path: Path) -> None:
    agent, own, added, script = (tmp_path / name for name in ("agent", "own.sh", "added.sh", "script"))
    agent.write_text('#!/bin/sh\nprintf "export SHOWN=\'%s %s\'\\n" "$1" "$2"\n')
    agent.chmod(0o755)
    own.write_text("export OWN=$BASH_ENV\n")
    exported = bash_env.exported(None, {"BASH_ENV": str(own)})
    added.write_text(bash_env.text(str(agent), "/run/settings", exported))
    script.write_text(f'#!/bin/bash {flags}\necho "$0 $- $SHOWN $OWN ${{BASH_ENV-none}} ${{muster_trace-none}}"\n')
    script.chmod(0o755)
    environ = {"PATH": os.environ["PATH"], "BASH_ENV": str(added), "SLURM_JOB_ID": "42"}
    done = subprocess.run([script], env=environ, capture_output=True, text=True, check=True)
    letters = done.stdout.split()[1]
    assert done.stdout == f"{script} {letters} shell /run/settings {own} {own} none\n"
    assert set(flags) - {"-"} <= set(letters)
    shown = done.stderr.splitlines()
    assert not [line for line in shown if "muster_lines" in line or "agent" in line], shown


@pytest.mark.parametrize(
    ("program", "call", "out"),
    [
        ("torchrun", "torchrun a 'b c'", "srun --nodes=1 --ntasks=1 torchrun a b c"),
        ("accelerate", "accelerate launch a", "srun --nodes=1 --ntasks=1 accelerate launch a"),
        ("accelerate", "accelerate env", "own env"),
        (
            "python3",
            "python3 -u -m torch.distributed.run a",
            "srun --nodes=1 --ntasks=1 python3 -u -m torch.distributed.run a",
        ),
        ("python3", "python3 train.py", "own train.py"),
        ("torchrun", "export SLURM_JOB_ID=43; torchrun a", "own a"),
    ],
)
def test_a_launcher_without_srun_is_started_by_srun(program: str, call: str, out: str, tmp_path: Path) -> None:
    for name, says in (
        ("agent", 'srun() { echo srun "$@"; }; export -f srun; export MUSTER_SCRIPT_JOB=42'),
        (program, "own"),
    ):
        body = f"cat <<'END'\n{says}\nEND\n" if name == "agent" else 'echo own "$@"\n'
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}")
        (tmp_path / name).chmod(0o755)
    added = tmp_path / "added.sh"
    added.write_text(bash_env.text(f"{tmp_path}/agent", "/run/x", bash_env.exported(None, {}), alone=program))
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BASH_ENV": str(added), "SLURM_JOB_ID": "42"}
    for shell in (["/bin/bash", "-c", call], ["/bin/bash", "-c", f'/bin/bash -c "{call}"']):
        done = subprocess.run(shell, env=environ, capture_output=True, text=True, check=True)
        assert done.stdout == f"{out}\n"


def test_an_agent_that_fails_ends_the_job(tmp_path: Path) -> None:
    added = tmp_path / "added.sh"
    added.write_text(bash_env.text("/bin/false", "/run/settings", bash_env.exported(None, {})))
    environ = {"BASH_ENV": str(added), "SLURM_JOB_ID": "42"}
    done = subprocess.run(["/bin/bash", "-c", "echo never"], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the job ends: /bin/false shell has failed on this node" in done.stderr


def test_an_sbatch_that_is_a_script_of_bash_itself_is_left_alone(tmp_path: Path) -> None:
    added = tmp_path / "added.sh"
    added.write_text(bash_env.text("/bin/false", "/run/settings", bash_env.exported(None, {}), job="7"))
    environ = {"BASH_ENV": str(added), "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["/bin/bash", "-c", "echo $BASH_ENV"], env=environ, capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{added}\n"


def test_any_script_gets_an_answer(shell: Shell) -> None:
    """Broken lines, quotes, options that nobody has, halves of scripts: queued as it is, supervised, or refused in
    words."""
    chance = random.Random(38)
    parts = [
        *("#SBATCH ", "#MUSTER ", "--nodes=", "-N", "-n 4", "--spares=1", "--gpus=a:2,b:", "--export=", "A,B"),
        *("hetjob", "--", "'", '"', "\\", " ", "\n", "\t", "#", ":", "=", "4", "2-8", "1k", "\u00e9", "\udc80"),
        *("--exclusive=user", "--job-name="),
        *("srun ", "torchrun ", "python x.py", "$X", "&", "|", "(", ")", "for x in", " do ", "done", "<<E", "-"),
        *("-s", "--signal=B:9@", "--comment="),
        *("--launch-line=", "--tensor=8", "--elastic", "--image x", "-w n[1-", "--segment=3", "-D /x%j", "-o l/%j"),
    ]  # fmt: skip
    options = parser(["submit"]).parse_args(["submit", "job.toml"])
    answers = {_answer("".join(chance.choices(parts, k=chance.randrange(14))), options) for _ in range(3000)}
    assert answers == {"Unsupervised", "Supervised", "Nothing was queued"}


def _answer(text: str, options: argparse.Namespace) -> str:
    script, call = UserScript(f"#!/bin/bash\n{text}", "x.sbatch"), ScriptCall((), (), "x.sbatch")
    try:
        found = look_over(script, call, None, {}, lambda _: "")
        return type(settle(found, options, {}, "/shared") if isinstance(found, Looked) else found).__name__
    except WrongInput as error:
        return error.hint.rpartition(". ")[2]


@pytest.mark.parametrize(
    ("words", "text", "shown"),
    [
        (["--spares=1"], TRAIN, (4, 1, True, "")),
        ([], "#!/bin/sh\n#SBATCH -N 2\n", (2, 0, True, "line 1: /bin/sh runs the script, and Muster supervises")),
        (["--array=1-2"], TRAIN, None),
        (
            ["--array=1-2"],
            "#!/bin/bash\nmpirun a\n",
            (
                1,
                0,
                True,
                "line 2: mpirun starts ranks by itself, where Muster does not see them; of the array, the last",
            ),
        ),
        (
            ["--parsable"],
            "#!/bin/bash\nmpirun a\n",
            (1, 0, True, "line 2: mpirun starts ranks by itself"),
        ),
    ],
)
async def test_the_coordinator_knows_the_job_at_once(
    words: list[str], text: str, shown: tuple[int, int, bool, str] | None, shell: Shell, tmp_path: Path
) -> None:
    (tmp_path / "world").mkdir()
    world = ScriptedWorld.create(tmp_path / "world")
    for _ in range(41):
        world.cluster.submit(JobRequest(nodes=1))
    await world.start_coordinator()
    (shell.folder / "train.sbatch").write_text(text)
    site = ["--coordinator", world.address, "--auth", f"secret:{tmp_path}/world/secret"]
    site += ["--connections", "plain text, the network is trusted"]
    options = parser(["submit"]).parse_args(["submit", *site, *words, "train.sbatch"])
    assert await options.row.run(options) == 0
    assert world.coordinator
    found = {gang.slurm.job: gang.spec for gang in world.coordinator.engine.core.state.gangs.values()}
    await world.close()
    if shown is None:
        assert found == {}
        return
    assert (found[42].nodes, found[42].spares, found[42].awaits_launch) == shown[:3]
    assert found[42].unsupervised.startswith(shown[3])
    assert bool(found[42].unsupervised) is bool(shown[3])
