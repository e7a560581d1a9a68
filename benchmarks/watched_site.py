"""What people who look at a site of 12,500 nodes in 1,000 jobs cost: `muster status`, and a hundred who follow a job.

The site trains in this process: the agents of the jobs that are followed report every two seconds, a step further. The
calls come over loopback from other processes.
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from benchmarks.fleet import Fleet, TrainingGang
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.coordinator.services.api_service import MusterService
from muster.daemon.coordinator.services.login_names import LoginNames
from muster.daemon.coordinator.shell.engine import Engine
from muster.daemon.coordinator.slurm.local_slurm import LocalSlurm
from muster.daemon.coordinator.slurm.lookup import SlurmLookup
from muster.daemon.coordinator.slurm.roster import SlurmRoster
from muster.daemon.host.process.process_memory import collect_seldom
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.channel import bind, make_server
from muster.daemon.transport.identity import SecretCredentials
from muster.daemon.transport.server_limits import COORDINATOR, StreamLimits
from muster.daemon.transport.tls import PLAIN_TEXT
from muster.v1 import api_pb2_grpc

NODES, GANGS, WATCHERS = 12_500, 1_000, 100
REPORT_S = 2.0
"""Seconds between two reports of an agent."""
ROUNDS = 9
ALONE_S, WATCHED_S = 15.0, 80.0
"""Seconds that are measured without watchers, before and after, and with them: several views for each."""
_WATCH = """
import asyncio, sys
from pathlib import Path
from muster.daemon.transport.identity import SecretCredentials
from muster.launcher.coordinator_client import CoordinatorClient, gang_ref
async def watch(gang):
    async with CoordinatorClient(sys.argv[1], SecretCredentials(Path(sys.argv[2]))) as client:
        async for view in client.watch(gang_ref(gang)):
            pass
async def main():
    await asyncio.gather(*(watch(gang) for gang in sys.argv[3:]))
asyncio.run(main())
"""

Figures = dict[str, float]


class _StillEngine(Engine):
    """An engine whose core is told by the measurement what happens, at the measurement's own times."""

    @property
    def running(self) -> bool:
        """Watchers are served."""
        return True


class Site:
    """A coordinator's API on loopback, in front of jobs that train."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._fleet = folder, Fleet()
        self.gangs = self._fleet.train(NODES, GANGS)
        self._journal = Journal(folder)
        self.credentials = SecretCredentials.create(folder / "secret")
        self._engine = _StillEngine(self._journal, self._journal.load(), LocalSlurm(), self.credentials)
        self._engine.core = self._fleet.core
        self.address = ""
        self.training_s = 0.0
        """Processor time of the training: it is not the watchers'."""

    async def serve(self) -> grpc.aio.Server:
        """Answer calls at `address`."""
        roster = SlurmRoster(LocalSlurm())
        rights, lookup = Rights(frozenset({os.getuid()})), SlurmLookup(LocalSlurm(), roster)
        service = MusterService(self._engine, lookup, roster, rights, StreamLimits(), login_names=LoginNames())
        server = make_server(self.credentials, COORDINATOR)
        api_pb2_grpc.add_MusterServicer_to_server(service, server)
        self.address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
        await server.start()
        return server

    async def train(self, gangs: list[TrainingGang]) -> None:
        """Agents of these jobs report, evenly spread over time, for ever."""
        pause_s = REPORT_S / len(gangs)
        while True:
            for gang in gangs:
                began = time.thread_time()
                gang.advance(1)
                self.training_s += time.thread_time() - began
                self._engine.gang_subscribers.notify(gang.id)
                await asyncio.sleep(pause_s)

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()


@dataclass(frozen=True, slots=True)
class _Spent:
    """Milliseconds of a command: until it had ended, and of processors, in its process and in the coordinator."""

    wall: float
    cpu: float
    coordinator: float


async def _run_command(*words: str) -> _Spent:
    own, before, began = time.process_time(), _children_s(), time.perf_counter()
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0, out
    wall, coordinator = time.perf_counter() - began, time.process_time() - own
    return _Spent(1000 * wall, 1000 * (_children_s() - before), 1000 * coordinator)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def _status(folder: Path) -> Figures:
    site = Site(folder)
    server = await site.serve()
    where = ("--coordinator", site.address, "--auth", f"secret:{folder}/secret", "--connections", PLAIN_TEXT)
    muster = str(Path(sys.executable).with_name("muster"))
    commands = {
        "floor": (sys.executable, "-c", "import grpc"),
        "list": (muster, "status", *where),
        "job": (muster, "status", *where, site.gangs[7].id),
    }
    found: dict[str, list[_Spent]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, words in commands.items():
            found[name].append(await _run_command(*words))
    await server.stop(None)
    site.close()
    floor, jobs, job = (min(one.wall for one in found[name]) for name in ("floor", "list", "job"))
    of_cpu = {name: statistics.median(one.cpu + one.coordinator for one in spent) for name, spent in found.items()}
    return {
        "status_ms": max(jobs, job) - floor,
        "status_list_ms": jobs - floor,
        "status_job_ms": job - floor,
        "status_floor_ms": floor,
        "status_list_cpu_ms": of_cpu["list"] - of_cpu["floor"],
        "status_job_cpu_ms": of_cpu["job"] - of_cpu["floor"],
        "status_list_coordinator_ms": statistics.median(one.coordinator for one in found["list"]),
    }


async def _watchers(folder: Path) -> Figures:
    site = Site(folder)
    server = await site.serve()
    watched = site.gangs[:WATCHERS]
    training = asyncio.create_task(site.train(watched))

    async def busy_percent(seconds: float) -> float:
        began = time.process_time() - site.training_s
        await asyncio.sleep(seconds)
        return 100 * (time.process_time() - site.training_s - began) / seconds

    before = await busy_percent(ALONE_S)
    names = [gang.id for gang in watched]
    watcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _WATCH, site.address, f"{folder}/secret", *names
    )
    await asyncio.sleep(ALONE_S)  # all of them have their first view
    with_watchers = await busy_percent(WATCHED_S)
    watcher.terminate()
    await watcher.wait()
    after = await busy_percent(ALONE_S)
    training.cancel()
    await server.stop(None)
    site.close()
    alone = (before + after) / 2
    return {"watchers_cpu_percent": with_watchers - alone, "watchers_noise_percent": abs(before - after)}


def status() -> Figures:
    """status_ms: the slower one of the list of all jobs and of one job, above a Python that imports gRPC. Times are the
    least of all rounds, and processor times medians: others use this machine, too."""
    return _run(_status)


def watchers() -> Figures:
    """watchers_cpu_percent: the share of a core of the coordinator that 100 watchers of 100 jobs take. Without them,
    it is busy otherwise, too: watchers_noise_percent is how much that differs before and after them."""
    return _run(_watchers)


def _run(measure: Callable[[Path], Awaitable[Figures]]) -> Figures:
    collect_seldom()  # as the coordinator does
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measured(measure, Path(folder)))


async def _measured(measure: Callable[[Path], Awaitable[Figures]], folder: Path) -> Figures:
    return await measure(folder)
