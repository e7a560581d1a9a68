"""`muster run --local`: which faults are due, their targets, and whole runs of a script without PyTorch."""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from muster.checkpoint.format.durable_folders import MANIFEST, METADATA
from muster.daemon.host import process_tree
from muster.daemon.transport.channel import bind, make_server
from muster.daemon.transport.gang_ids import job_identity
from muster.daemon.transport.identity import SecretCredentials
from muster.daemon.transport.server_limits import COORDINATOR
from muster.launcher.commands import run as run_command
from muster.launcher.errors import WrongInput
from muster.launcher.local.cluster import LocalCluster
from muster.launcher.local.faults import Fault, Kind, describe_missed, due_faults, parse_fault
from muster.launcher.local.run import check_faults
from muster.v1.api_pb2 import GangView, RankView
from muster.v1.common_pb2 import JobSpec


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill-node@step=30", Fault(Kind.KILL_NODE, 30)),
        ("kill-node@step=0,node=n2", Fault(Kind.KILL_NODE, 0, node="n2")),
        ("kill-rank@time=5,rank=0", Fault(Kind.KILL_RANK, time=5, rank=0)),
        ("hang-rank@step=9,rank=1", Fault(Kind.HANG_RANK, 9, rank=1)),
        ("xid-node@step=7,code=48", Fault(Kind.XID_NODE, 7, code=48)),
    ],
)
def test_faults_as_written(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kill-node", "must be KIND@step=N"),
        ("crash@step=3", "must be KIND@step=N"),
        ("kill-node@node=n1", "must be KIND@step=N"),
        ("kill-node@step=3,time=4", "must be KIND@step=N"),
        ("kill-node@step=3,step=4", "must be KIND@step=N"),
        ("kill-node@step=three", "step=three must be a whole number"),
        ("kill-node@step=3,rank=1", "kill-node accepts node, step, time, not rank"),
    ],
)
def test_an_invalid_fault_is_refused(text: str, words: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        parse_fault(text)
    assert words in str(refused.value)


def view(step: int, phase: str = "RUNNING") -> GangView:
    """Two nodes with two ranks each."""
    ranks = [RankView(rank=rank, node=f"n{rank // 2}", state="running") for rank in range(4)]
    return GangView(phase=phase, step=step, ranks=ranks)


def test_a_fault_is_due_when_its_step_is_finished_and_the_gang_runs() -> None:
    fault = Fault(Kind.KILL_NODE, 10)
    assert not due_faults([fault], view(9), 1.0)
    assert not due_faults([fault], view(10, "RECOVERING"), 1.0)
    [hit] = due_faults([fault], view(11), 1.0)
    assert (hit.node, hit.rank) == ("n1", 3)


def test_a_fault_that_was_never_due_is_reported() -> None:
    assert (
        describe_missed(Fault(Kind.KILL_NODE, 10), 7)
        == "kill-node@step=10 was not injected: the gang ended after 7 reported steps"
    )
    assert "use time=SECONDS" in describe_missed(Fault(Kind.KILL_NODE, 10), 0)
    assert describe_missed(Fault(Kind.KILL_RANK, time=5), 0).startswith("kill-rank@time=5 was not injected")


def test_a_fault_is_due_when_its_time_has_come() -> None:
    fault = Fault(Kind.KILL_RANK, time=5, rank=1)
    assert not due_faults([fault], view(0), 4.9)
    [hit] = due_faults([fault], view(0), 5.0)
    assert (hit.node, hit.rank) == ("n0", 1)


def test_a_spare_can_be_hit() -> None:
    [hit] = due_faults([Fault(Kind.KILL_NODE, 1, node="n9")], view(1), 0.0)
    assert hit.node == "n9"


def test_a_target_that_does_not_exist_is_refused() -> None:
    with pytest.raises(WrongInput, match="no node n3; nodes are n0 to n2"):
        check_faults([Fault(Kind.KILL_NODE, 1, node="n3")], nodes=3, ranks=2)
    with pytest.raises(WrongInput, match="no rank 2; ranks are 0 to 1"):
        check_faults([Fault(Kind.KILL_RANK, 1, rank=2)], nodes=3, ranks=2)


# Whole runs


ONE_NODE = ("--nodes", "1", "--spares", "0")
"""Options of a run in which no rank moves: each further node is three processes."""


class Run:
    """`muster run --local` with a shell script, started as a user starts it."""

    def __init__(
        self, folder: Path, script: str, *options: str, umask: int = -1, argv: Sequence[str] = (), **variables: str
    ) -> None:
        """`argv`: all words, in place of `--local`, the options and the script."""
        self.mark = f"MARK_{os.getpid()}_{time.monotonic_ns()}"
        words = argv or ("--local", "--nodes", "2", "--spares", "1", *options, "--", "sh", "-c", script)
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "muster.launcher", "run", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder), self.mark: "1", **variables},
            start_new_session=True,
            umask=umask,
        )

    def end(self, seconds: float = 240.0) -> tuple[int, str, str]:
        """Exit status, standard output and standard error."""
        out, err = self.popen.communicate(timeout=seconds)
        return self.popen.returncode, out, err

    def until(self, words: str) -> None:
        """Waits for a line with `words` on standard output."""
        assert self.popen.stdout
        assert self.popen.stderr
        for line in self.popen.stdout:
            if words in line:
                return
        raise AssertionError(f"ended without {words!r}: {self.popen.stderr.read()}")

    def pid_of(self, module: str) -> int:
        """The process that runs `module`."""
        (pid,) = [pid for pid, words in self._marked().items() if module in words.split("\0")]
        return pid

    def left(self) -> list[str]:
        """The processes of this run that still exist after a minute. Each has a mark in its environment."""
        deadline = time.monotonic() + 60.0
        while (found := self._marked()) and (rest := deadline - time.monotonic()) > 0.0:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                end = os.pidfd_open(next(iter(found)))
                select.select([end], [], [], rest)
                os.close(end)
        return list(found.values())

    def _marked(self) -> dict[int, str]:
        """The command lines by pid; their words end with NUL."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (path / "environ").read_bytes():
                    found[int(path.name)] = (path / "cmdline").read_text()
            except OSError:
                continue
        return found


@pytest.fixture(autouse=True)
def _no_orphans_of_ours() -> None:
    """If a test fails halfway, the guard still ends its processes."""
    process_tree.adopt_orphans()


def test_a_lost_node_is_replaced_by_the_spare(tmp_path: Path) -> None:
    # The first generation never ends by itself.
    script = 'echo generation $MUSTER_GENERATION; if [ "$MUSTER_GENERATION" = 1 ]; then exec sleep 600; fi'
    run = Run(tmp_path, script, "--fault", "kill-node@time=0")
    status, out, err = run.end()
    # The fault may come before the first generation has printed.
    assert (status, out.removeprefix("generation 1\n")) == (0, "generation 2\n"), err
    assert "muster: generation 2 starts at step 0 unless its script names a checkpoint, swap; ranks on n0 n2" in err
    assert run.left() == []
    assert list(tmp_path.iterdir()) == []


def test_another_terminal_shows_a_run_meanwhile(tmp_path: Path) -> None:
    words = 'config=$(ls "$TMPDIR"/muster-local-*/muster.toml)'
    ask = f"{sys.executable} -m muster.launcher status --config $config --json 1"
    script = f"{words}; {ask}; head -n 1 $(dirname $config)/coordinator.log"
    status, out, err = Run(tmp_path, script, *ONE_NODE, MUSTER_LOG_FORMAT="json").end()
    assert status == 0, err
    (config,) = re.findall(r"muster: in another terminal: muster status --config (\S+) 1\n", err)
    assert Path(config).parent.parent == tmp_path
    shown, logged = map(json.loads, out.splitlines())
    assert (shown["name"], logged.keys() >= {"level", "message"}) == ("local", True)


def test_what_an_earlier_local_run_has_left_is_never_taken_or_passed_over_in_silence(tmp_path: Path) -> None:
    durable, script = tmp_path / "durable", "echo generation $MUSTER_GENERATION"
    env = {name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    spec = JobSpec(
        name="local", command=["sh", "-c", script], durable_dir=str(durable), env=env, work_dir=str(tmp_path)
    )
    left = durable / "step_00000176_g1_local-0a1b2c3d"
    left.mkdir(parents=True)
    (left / METADATA).touch()
    (left / MANIFEST).write_text(json.dumps({"gang": "local-0a1b2c3d", "job": job_identity(spec)}))
    status, _, err = Run(tmp_path, script, *ONE_NODE, "--durable-dir", str(durable)).end()
    assert status == 64, err
    assert f"an earlier run of this job, {left}, and nobody knows how that run ended" in err
    status, _, err = Run(tmp_path, script, *ONE_NODE, "--durable-dir", str(durable), "--resume", str(left)).end()
    assert status == 0, err
    assert f"muster: goes on at step 176 from {left}, of gang local-0a1b2c3d" in err
    assert f"muster: generation 1 starts from {left}" in err


@pytest.mark.long
def test_a_fatal_xid_in_the_kernel_log_moves_the_ranks(tmp_path: Path) -> None:
    """Also where the user's files are writable by their group: musterd believes no such file, so this one is not."""
    script = 'echo generation $MUSTER_GENERATION; if [ "$MUSTER_GENERATION" = 1 ]; then exec sleep 600; fi'
    run = Run(tmp_path, script, "--fault", "xid-node@time=0", umask=0o002)
    status, out, err = run.end()
    # The fault may come before the first generation has printed.
    assert (status, out.removeprefix("generation 1\n")) == (0, "generation 2\n"), err
    assert "muster: generation 2 starts at step 0 unless its script names a checkpoint, swap; ranks on n0 n2" in err
    assert run.left() == []


TRAINS = """
import os, time
from muster.checkpoint.training.agent_connection import AgentConnection
link = AgentConnection.from_environment()
link.join()
step = 0
while step < 3 or os.environ["MUSTER_GENERATION"] == "1":
    time.sleep(0.05)
    step += 1
    link.report_progress(step)
"""


@pytest.mark.long
def test_a_rank_that_is_stopped_hangs_and_is_restarted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    options = (*ONE_NODE, "--fault", "hang-rank@step=10", "--hang-after", "5")
    run = Run(tmp_path, f"exec {sys.executable} train.py", *options, "--run-dir", str(tmp_path / "kept"))
    status, _, err = run.end()
    assert status == 0, err
    (step,) = re.findall(r"FAULT, step (\d+)", err)
    assert int(step) >= 10
    assert "stack traces of generation 1 beside its logs: hang: no rank has finished a step for" in err
    assert "generation 2 starts at step 0 unless its script names a checkpoint, restart in place; ranks on n0" in err
    assert "Slurm" not in err  # it was asked meanwhile: the run takes longer than two of its polls
    (stacks,) = (tmp_path / "kept" / "logs").glob("local-*/g1/rank0.stacks")
    assert "T (stopped)" in stacks.read_text()
    assert run.left() == []


def test_the_exit_code_of_the_script_is_the_exit_code_of_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, "echo cannot go on >&2; exit 7", *ONE_NODE, "--run-dir", str(tmp_path / "kept"))
    status, _, err = run.end()
    assert status != 0, err
    assert "exited with 7: cannot go on" in err
    assert "Slurm" not in err
    assert "are kept in" in err
    logs = (tmp_path / "kept" / "logs").glob("local-*/g*/rank*.log")
    assert "cannot go on\n" in {log.read_text() for log in logs}
    assert run.left() == []


def test_a_run_whose_coordinator_is_stopped_is_no_success(tmp_path: Path) -> None:
    run = Run(tmp_path, "echo up; exec sleep 600", *ONE_NODE)
    run.until("up")
    os.kill(run.pid_of("muster.daemon.coordinator"), signal.SIGTERM)
    status, _, err = run.end()
    assert status in (69, 78), err  # whichever stream ends first
    assert "systemctl" not in err  # nothing of a site is at fault
    assert run.left() == []


async def test_the_coordinators_port_is_reserved(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path, JobSpec(), "gang")
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", int(cluster.address.rpartition(":")[2])))
    SecretCredentials.create(cluster.secret)
    server = make_server(SecretCredentials(cluster.secret), COORDINATOR)
    assert cluster.address.endswith(f":{bind(server, cluster.address)}")
    await server.start()
    await server.stop(None)
    cluster.stop()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGQUIT, marks=pytest.mark.long)])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    run = Run(tmp_path, "echo up; exec sleep 600", *ONE_NODE)
    run.until("up")
    run.popen.send_signal(number)
    assert run.end()[0] == 130
    assert run.left() == []
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    run = Run(tmp_path, "echo up; exec sleep 600")
    run.until("up")
    run.popen.kill()
    run.end()
    assert run.left() == []


def test_a_bad_command_line_is_explained(tmp_path: Path) -> None:
    status, _, err = Run(tmp_path, "true", "--nodes", "0").end()
    assert status == 64
    assert "nodes = 0: must be 1 or more" in err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python3 none.py --steps 50", "the script .*/none.py does not exist"),
        ("./none", "the program .*/none does not exist"),
        ("pyhton3 train.py", "no program 'pyhton3' is in PATH: name its path"),
        ("train.py", "no program 'train.py' is in PATH: write ./train.py for the file in"),
    ],
)
async def test_what_is_not_on_this_host_is_said_before_anything_starts(
    command: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    with pytest.raises(WrongInput, match=words):
        await run_command.COMMAND.run(local_options("--", *command.split()))


async def test_a_local_run_resumes_from_a_path_and_from_no_job() -> None:
    with pytest.raises(WrongInput, match="--resume 17: a run on this workstation knows no other jobs"):
        await run_command.COMMAND.run(local_options("--resume", "17", "--", "true"))


def local_options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    run_command.COMMAND.arguments(parser)
    return parser.parse_args(["--local", *words])


def test_a_store_of_objects_is_taken_once_it_is_trusted(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    run_command.COMMAND.arguments(parser)
    given = ["--local", "--nodes=2", "--spares=1", "--durable-dir", "s3://bucket/jobs"]
    trusted = run_command._spec(parser.parse_args([*given, "--trust-durable-store", "--", "true"]), tmp_path)
    assert (trusted.durable_dir, trusted.trust_durable_store) == ("s3://bucket/jobs", True)
    with pytest.raises(WrongInput, match="may write there, set --trust-durable-store"):
        run_command._spec(parser.parse_args([*given, "--", "true"]), tmp_path)
    with pytest.raises(WrongInput, match="is for a durable_dir that is a URL"):
        run_command._spec(
            parser.parse_args(["--local", "--nodes=2", "--spares=1", "--trust-durable-store", "--", "true"]), tmp_path
        )


# In place of torchrun


TORCHRUN = """#!{python}
import sys, types
sys.path.append("{folder}/lib")
from torch.distributed.launcher import api
nodes, *script = sys.argv[1:]
count = int(nodes.partition("=")[2])
said = dict(role="default", run_id="none", max_restarts=0, logs_specs=None)
config = types.SimpleNamespace(min_nodes=count, max_nodes=count, nproc_per_node=2, **said)
api.launch_agent(config, "/bin/sh", ["-c", *script])
"""


@pytest.fixture
def with_torchrun(tmp_path: Path) -> Path:
    """A folder with a program torchrun that starts two ranks on each node, and their script."""
    library = tmp_path / "lib/torch/distributed/launcher"
    library.mkdir(parents=True)
    for path in (library, library.parent, library.parent.parent):
        (path / "__init__.py").touch()
    (library / "api.py").write_text("def launch_agent(*_):\n    raise AssertionError('nobody took the launch over')\n")
    (tmp_path / "torchrun").write_text(TORCHRUN.format(python=sys.executable, folder=tmp_path))
    (tmp_path / "torchrun").chmod(0o700)
    return tmp_path


def in_place_of_torchrun(folder: Path, *words: str) -> Run:
    return Run(folder, "", argv=words, PATH=f"{folder}:{os.environ['PATH']}")


def test_a_rank_that_is_killed_is_started_again_and_all_output_is_shown(with_torchrun: Path) -> None:
    script = (
        "echo $RANK of $WORLD_SIZE, $TORCHELASTIC_RESTART_COUNT$SLURM_JOB_ID; [ $MUSTER_GENERATION = 2 ] || kill -9 $$"
    )
    status, out, err = in_place_of_torchrun(with_torchrun, script).end()
    assert status == 0, err
    assert {f"{rank} of 2, 1" for rank in (0, 1)} <= set(out.splitlines())
    assert "(SIGKILL)\n  error_file: <N/A>\n  traceback : Signal 9 (SIGKILL) received by PID" in err


def test_ranks_that_fail_again_and_again_end_as_torchrun_ends(with_torchrun: Path) -> None:
    assert in_place_of_torchrun(with_torchrun, "exit 3").end()[0] == 1


def test_a_launcher_that_launches_nothing_ends_with_its_own_code_and_leaves_nothing(with_torchrun: Path) -> None:
    done = in_place_of_torchrun(with_torchrun, "--nnodes=1", "--", "/usr/bin/python3", "x").end()
    assert (done[0], "leave python out" in done[2]) == (64, True)
    status, _, err = in_place_of_torchrun(with_torchrun, "--nnodes=5", "true").end()
    assert (status, "asks for --nnodes=5, and the ranks are to run on 1 node: write" in err) == (64, True), err
    assert not list(with_torchrun.glob("muster-local-*"))


def test_ctrl_c_ends_all_of_it_and_ranks_get_the_signal_as_from_torchrun(with_torchrun: Path) -> None:
    started = in_place_of_torchrun(with_torchrun, "trap 'echo saved; exit' INT; echo up; sleep 600 & wait")
    started.until("up")
    started.popen.send_signal(signal.SIGINT)
    status, out, _ = started.end()
    assert (status, "saved\n" in out) == (1, True)
    assert started.left() == []
