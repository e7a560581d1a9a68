"""The pyslurm worker and its owner: real processes, with a small replacement of `pyslurm` in a folder."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.slurm.client.backends.worker_process import WorkerProcess
from muster.slurm.client.errors import SlurmRefused, SlurmTimeout, SlurmUnavailable

# As much of pyslurm's interface as the worker uses. It prints where a C library would, and misbehaves by name.
PYSLURM = """
import os, sys, time
print("slurm: noise on stdout")
class RPCError(Exception): pass
class JobSubmitDescription: pass
class Record:
    def __getattr__(self, name): return None
class Node(Record):
    def __init__(self, name=None, **fields):
        self.name = name
        self.__dict__.update(fields)
    @staticmethod
    def load(name):
        if name == "hang": time.sleep(100000)
        if name == "crash": os.abort()
        if name == "gone": raise RPCError("Node 'gone' does not exist")
        if name == "silent": raise RPCError("Unable to contact slurm controller (connect failure)")
        return Node(name, state="IDLE+DRAIN")
    def modify(self, change):
        if self.name == "forbidden": raise RPCError("Invalid user id")
        open("drained", "a").write(f"{self.name} {change.state} {change.reason}\\n")
class Nodes:
    @staticmethod
    def load(): return {name: Node(name, state="IDLE") for name in map("n{}".format, range(120))}
class Job(Record):
    def __init__(self, id): self.id = id
    @staticmethod
    def load(id): raise RPCError("Invalid job id specified")
    def modify(self, change): open("changed", "a").write(f"{self.id} {vars(change)}\\n")
"""


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[WorkerProcess]:
    (tmp_path / "pyslurm.py").write_text(PYSLURM)
    (tmp_path / "slurm.conf").touch()
    process = WorkerProcess(argv(tmp_path))
    yield process
    await process.aclose()


def argv(folder: Path, configuration: str = "slurm.conf") -> list[str]:
    where = f"PYTHONPATH={folder}", f"SLURM_CONF={folder / configuration}", f"--chdir={folder}"
    return ["env", where[2], *where[:2], sys.executable, "-m", "muster.slurm.client.backends.pyslurm_worker"]


async def names(worker: WorkerProcess, *asked: str, timeout_s: float = 60) -> list[str]:
    records = await worker.request("show nodes", timeout_s, "nodes", names=list(asked) or None)
    return [record["name"] for record in records]


async def test_records_come_through_noise(worker: WorkerProcess) -> None:
    assert await names(worker, "n1") == ["n1"]
    assert await names(worker) == [f"n{number}" for number in range(120)]
    assert await names(worker, "n5", "n7", "nowhere") == ["n5", "n7"]
    assert await names(worker, "gone") == []
    assert await worker.request("show jobs", 60, "jobs", ids=[7]) == []


async def test_changes_reach_pyslurm(worker: WorkerProcess, tmp_path: Path) -> None:
    await worker.request("drain", 60, "update_node", node="n1", state="DRAIN", reason="why")
    changes = {"ExcNodeList": "n1,n2", "StartTime": "now", "Requeue": "0", "Comment": "x"}
    await worker.request("update", 60, "update_job", job=7, changes=changes)
    assert (tmp_path / "drained").read_text() == "n1 DRAIN why\n"
    assert (tmp_path / "changed").read_text() == (
        "7 {'excluded_nodes': 'n1,n2', 'begin_time': 'now', 'is_requeueable': False, 'comment': 'x'}\n"
    )


async def test_refusals_leave_the_worker_alive(worker: WorkerProcess) -> None:
    with pytest.raises(SlurmRefused, match="refused to drain forbidden: Invalid user id"):
        await worker.request("drain forbidden", 60, "update_node", node="forbidden", state="DRAIN", reason="why")
    with pytest.raises(SlurmUnavailable):
        await names(worker, "silent")
    before = worker.pid
    assert await names(worker, "n1") == ["n1"]
    assert worker.pid == before


async def test_a_hanging_call_costs_only_its_own_timeout(worker: WorkerProcess) -> None:
    await worker.start(60)
    before = worker.pid
    hanging = asyncio.create_task(names(worker, "hang", timeout_s=0.3))
    await asyncio.sleep(0)
    behind = asyncio.create_task(names(worker, "n2", timeout_s=60))
    with pytest.raises(SlurmTimeout, match=r"no answer within 0\.3 s"):
        await hanging
    assert await behind == ["n2"]
    assert worker.pid != before


async def test_a_call_behind_a_hanging_call_keeps_its_own_deadline(worker: WorkerProcess) -> None:
    await worker.start(60)
    hanging = asyncio.create_task(names(worker, "hang"))
    await asyncio.sleep(0)
    with pytest.raises(SlurmTimeout):
        await names(worker, "n2", timeout_s=0.2)
    assert not hanging.done()
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):  # the worker has ended
        await hanging


async def test_a_cancelled_call_leaves_no_answer_for_the_next(worker: WorkerProcess) -> None:
    await worker.start(60)
    hanging = asyncio.create_task(names(worker, "hang"))
    await asyncio.sleep(0)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert await names(worker, "n3") == ["n3"]


async def test_a_crash_in_c_is_no_answer(worker: WorkerProcess) -> None:
    with pytest.raises(SlurmTimeout, match="worker died"):
        await names(worker, "crash")
    assert await names(worker, "n1") == ["n1"]


async def test_without_a_configuration_pyslurm_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "pyslurm.py").write_text("import os; os.abort()")
    worker = WorkerProcess(argv(tmp_path, "nowhere.conf"))
    with pytest.raises(SlurmUnavailable, match=r"slurm\.conf"):
        await worker.start(60)
    await worker.aclose()


async def test_missing_pyslurm_is_reported(tmp_path: Path) -> None:
    (tmp_path / "pyslurm.py").write_text("raise ImportError('no module of that name')")
    (tmp_path / "slurm.conf").touch()
    worker = WorkerProcess(argv(tmp_path))
    with pytest.raises(SlurmUnavailable, match="no module of that name"):
        await worker.start(60)
    await worker.aclose()


STARTS_AND_GOES = """
import asyncio, os, signal, sys
from muster.slurm.client.backends import run_command as command

async def main():
    held, lease_s, how = int(sys.argv[1]), float(sys.argv[2]), getattr(signal, sys.argv[3])
    call = await command.start(["sh", "-c", "echo there; exec sleep 60"], stdin=held, lease_s=lease_s)
    os.close(held)
    await call.stdout.readline()
    os.kill(os.getpid(), how)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("lease_s", "how"),
    [("inf", "SIGKILL"), ("50", "SIGKILL"), ("0.3", "SIGSTOP")],
    ids=["dies", "dies with time left", "stands still"],
)
def test_a_call_ends_with_its_caller_or_with_the_lease(lease_s: str, how: str) -> None:
    """Otherwise Slurm could execute a late call of a coordinator that has been replaced."""
    hears, held = os.pipe()
    with subprocess.Popen([sys.executable, "-c", STARTS_AND_GOES, str(held), lease_s, how], pass_fds=[held]) as caller:
        os.close(held)
        readable, _, _ = select.select([hears], [], [], 30)
        caller.kill()
    os.close(hears)
    assert readable, "the call has ended, and with it the last writer of the pipe"


def test_a_pyslurm_worker_ends_with_the_lease_even_without_its_owner(tmp_path: Path) -> None:
    (tmp_path / "pyslurm.py").write_text(PYSLURM)
    (tmp_path / "slurm.conf").touch()
    with subprocess.Popen(argv(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as worker:
        assert worker.stdin
        worker.stdin.write(b'["nodes", {"names": ["n1"]}, 0.2]\n["nodes", {"names": ["hang"]}, 0.2]\n')
        worker.stdin.flush()
        assert worker.wait(30) == -signal.SIGALRM


async def test_a_request_ends_with_the_lease(tmp_path: Path) -> None:
    (tmp_path / "pyslurm.py").write_text(PYSLURM)
    (tmp_path / "slurm.conf").touch()
    worker = WorkerProcess(argv(tmp_path), lease_guard=lambda: 0.3)
    with pytest.raises(SlurmTimeout, match=r"no answer within"):
        await names(worker, "hang")
    assert await names(worker, "n1") == ["n1"]
    await worker.aclose()


RUNS = """
import asyncio
from muster.slurm.client.backends import run_command as command

async def main():
    for _ in range(2):
        print((await command.run(["echo", "done"], timeout_s=60)).stdout, end="")

asyncio.run(main())
"""


@pytest.mark.parametrize("old", ["#!/bin/sh\necho tried >>$0.log; exit 1\n", ""], ids=["too old", "none"])
def test_calls_work_on_a_host_that_cannot_limit_their_lifetime(tmp_path: Path, old: str) -> None:
    """setpriv has --pdeathsig since util-linux 2.33. The test for it runs once in each process."""
    if old:
        (tmp_path / "setpriv").write_text(old)
        (tmp_path / "setpriv").chmod(0o755)
    (tmp_path / "echo").symlink_to(shutil.which("echo") or "")
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}" if old else str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", RUNS], env=path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "done\ndone\n"
    if old:
        assert (tmp_path / "setpriv.log").read_text() == "tried\n"
