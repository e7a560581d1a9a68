"""Runs the Slurm contract with a real backend, on a host of the cluster, as root or the Slurm user.

    run_slurm_contract.py BACKEND USER [CHECK ...]     BACKEND: cli or pyslurm

Prints one JSON line for each check: {"check", "ok", "seconds", "error"}. The exit status is the number of failed
checks. A program outside the cluster must do what this one cannot: this program prints {"please": "power_off" or
"power_on", "node": NAME}, and waits for the line "done" on stdin. USER is the ordinary user who owns the jobs. The
checks never block the event loop: while slurmctld is silent, the longest pause of the loop is measured and reported as
a check.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from muster.slurm.client.backends import run_command
from muster.slurm.client.backends.commands import CliSlurm
from muster.slurm.client.backends.open import open_slurm
from muster.slurm.client.types import Job, Node, Slurm, Unknown

HERE = Path(__file__).resolve().parent
LONGEST_STALL_S = 3.5  # a loop that waits for a silent slurmctld stands still for four; less does a busy machine


def contract() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slurm_contract", HERE / "slurm_contract.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class RealWorld:
    """The cluster that this host belongs to."""

    def __init__(self, slurm: Slurm, user: str) -> None:
        self.slurm = slurm
        self._user = user
        self._cli = CliSlurm()
        self._lost: list[str] = []

    async def lose(self, node: str) -> None:
        await please("power_off", node)
        self._lost.append(node)

    async def start(self, options: Sequence[str] = (), *, ends_with: int | None = None) -> int:
        script = "srun --no-kill sleep 600" if ends_with is None else f"exit {ends_with}"
        sbatch = ["sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={script}"]
        argv = ["setpriv", f"--reuid={self._user}", "--init-groups", *sbatch]
        done = await run_command.run(argv, timeout_s=20, cwd=Path("/tmp"))
        assert done.exit_status == 0, done.error_text
        return int(done.stdout.split(";")[0])

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def silence(self, silent: bool) -> None:
        for pid in controllers():
            os.kill(pid, signal.SIGSTOP if silent else signal.SIGCONT)
            # Its other threads answer on until the thread that got the signal has run and stopped them.
            while silent and not all_threads_stopped(pid):
                time.sleep(0.001)

    async def clean(self) -> None:
        """Ends all jobs, and waits until every node is idle."""
        jobs = await self._cli.jobs(timeout_s=20)
        assert not isinstance(jobs, Unknown), jobs
        for id, job in jobs.items():
            if not (isinstance(job, Job) and job.state.ended):
                await self._cli.cancel(id, timeout_s=20)
        while self._lost:
            await please("power_on", self._lost.pop())
        end = time.monotonic() + 300
        while True:
            nodes = await self._cli.nodes(timeout_s=20)
            assert not isinstance(nodes, Unknown), nodes
            tired = [node for node in nodes.values() if isinstance(node, Node) and not idle(node)]
            if not tired:
                return
            assert time.monotonic() < end, f"not idle: {[(node.name, node.states) for node in tired]}"
            for node in tired:
                if node.drained or node.down:
                    await self._cli.resume(node.name, timeout_s=20)
            await asyncio.sleep(0.2)


async def please(what: str, node: str) -> None:
    """Asks the program outside to do `what` to `node`."""
    print(json.dumps({"please": what, "node": node}), flush=True)
    answer = await asyncio.to_thread(sys.stdin.readline)
    assert answer.strip() == "done", f"{what} {node}: {answer!r}"


def idle(node: Node) -> bool:
    return {state.value for state in node.states} == {"IDLE"}


def controllers() -> list[int]:
    """The slurmctld processes on this host."""
    found = []
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            name = words.read_text().partition("\0")[0]  # its `comm` is "exe" once it has reconfigured
        except OSError:
            continue  # it has ended meanwhile
        if Path(name).name == "slurmctld":
            found.append(int(words.parent.name))
    assert found, "no slurmctld on this machine: run this on the controller"
    return found


def all_threads_stopped(pid: int) -> bool:
    """True if every thread of the process is stopped (state T in /proc)."""
    stats = [thread.read_text() for thread in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(") ")[2].startswith("T") for stat in stats)


class Stalls:
    """Measures the longest time in which the event loop did not run."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            self.longest = max(self.longest, time.monotonic() - before - 0.01)


async def run(backend: str, user: str, only: list[str]) -> int:
    slurm = await open_slurm(prefer=backend, strict=True)
    world = RealWorld(slurm, user)
    stalls = Stalls()
    watch = asyncio.create_task(stalls.watch())
    failed = 0
    for check in contract().CHECKS:
        if only and check.__name__ not in only:
            continue
        await world.clean()
        stalls.longest = 0.0
        began, error = time.monotonic(), ""
        try:
            await check(world)
        except Exception:  # noqa: BLE001  one check must not keep the others from running
            error = traceback.format_exc()
        waited = check.__name__ == "silence_is_unknown_and_never_gone"
        if not error and waited and stalls.longest > LONGEST_STALL_S:
            error = f"the event loop stood still for {stalls.longest:.3f} s"
        failed += bool(error)
        line = {"check": check.__name__, "ok": not error, "seconds": round(time.monotonic() - began, 3)}
        print(json.dumps({**line, "stall": round(stalls.longest, 3), "error": error}), flush=True)
    await world.clean()
    await slurm.aclose()
    watch.cancel()
    return failed


if __name__ == "__main__":
    sys.exit(asyncio.run(run(sys.argv[1], sys.argv[2], sys.argv[3:])))
