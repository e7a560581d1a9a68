"""Follows a gang on a local cluster: prints events and output, injects faults when they are due, cleans up."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from muster.daemon.host import clock, rank_log_files
from muster.daemon.transport.identity import SecretCredentials
from muster.launcher.command import print_note
from muster.launcher.coordinator_client import CoordinatorClient, gang_ref
from muster.launcher.errors import SiteFault, Unavailable, WrongInput
from muster.launcher.local import faults
from muster.launcher.local.cluster import LocalCluster
from muster.launcher.local.faults import Fault
from muster.launcher.output.rank_logs import RankLogReader, Wanted
from muster.v1.api_pb2 import EventsRequest, GangView

_ATTACH_TIMEOUT_S = 120.0
"""Seconds until the first agent must have attached. A process that ends is noticed at once: this only ends a wait that
would never end, so it is long enough for a busy machine."""
_FINAL_VIEW_TIMEOUT_S = 10.0
"""Seconds to wait for the gang's final state after all agents have exited."""
_CANCEL_INTERVAL_S = 0.5
"""Seconds between two cancellations of a task that has not ended."""
_POLL_S = 0.1
"""Seconds between two reads of the ranks' output, and between two attempts to reach the coordinator."""
_FAULT_POLL_S = 0.02
"""Seconds between two checks for due faults: shorter than a step of a small script."""
_PREFIX = "muster: "
_OWN_PROCESS = "it is a process of this local run, which has ended or does not answer: start the run again"
_OF_SLURM = frozenset({"SlurmOwed", "SlurmSettled", "ActionWithheld", "JobChanged", "JobOver"})
"""Events about calls to Slurm and about its answers. A local run has no Slurm."""


class NothingLaunched(Exception):
    """A launcher has ended before it started any rank. `status` is its exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class LocalRun:
    """Follows the gang `gang` of `cluster` until it ends."""

    def __init__(self, cluster: LocalCluster, gang: str, run_dir: str, planned: list[Fault]) -> None:
        self._cluster, self._gang = cluster, gang
        self._planned = planned
        self._reader = RankLogReader(rank_log_files.log_folder(run_dir, gang), Wanted(ranks=(0,)))
        self._copies = not cluster.launcher
        self._view = GangView()
        self._ran_at = 0.0

    async def follow(self) -> GangView:
        """Follows the gang until it is final. Returns its last view.

        Raises:
            LauncherError: a process of the local cluster failed.
            NothingLaunched: a launcher was to say what runs, and has said nothing.
        """
        secret = SecretCredentials(self._cluster.secret)
        coordinator = CoordinatorClient(self._cluster.address, secret, where_to_look=_OWN_PROCESS)
        async with coordinator:
            await self._begin(coordinator)
            tasks = [
                asyncio.create_task(work)
                for work in (self._events(coordinator), self._output(), self._faults(), self._guard_cluster())
            ]
            try:
                await _first_error(asyncio.create_task(self._watch(coordinator)), tasks)
                await asyncio.wait([tasks[0]], timeout=1.0)  # wait for the last events
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._copy(to_end=True)
        for fault in self._planned:
            print_note(f"{_PREFIX}{faults.describe_missed(fault, self._view.step)}")
        return self._view

    async def _begin(self, coordinator: CoordinatorClient) -> None:
        """Waits until the first agent has registered the gang."""
        deadline = clock.monotonic() + _ATTACH_TIMEOUT_S
        while True:
            # Check the processes first: when agents have exited, the coordinator already knows a gang that ended early.
            words = self._cluster.failure()
            try:
                if await coordinator.has_gang(self._gang):
                    return
                settled = True
                if self._cluster.launch_status is not None:
                    raise NothingLaunched(self._cluster.launch_status)
            except Unavailable:
                settled = (
                    self._cluster.coordinator_has_ended
                )  # else the coordinator, or the connection, is only starting
            if words and settled:
                raise SiteFault(words)
            if clock.monotonic() > deadline and not self._cluster.launcher:  # a launcher may import for minutes
                raise Unavailable(f"no local agent has attached within {_ATTACH_TIMEOUT_S:g} s")
            await asyncio.sleep(_POLL_S)

    async def _watch(self, coordinator: CoordinatorClient) -> None:
        async for view in coordinator.watch(gang_ref(self._gang)):
            self._view = view
            if view.phase == "RUNNING" and not self._ran_at:
                self._ran_at = clock.monotonic()
        if not self._view.final:
            # A coordinator that stops ends its streams without an error.
            last = self._cluster.coordinator.last_log_line if self._cluster.coordinator else ""
            raise SiteFault(f"the local coordinator stops before the gang has ended: {last}")

    async def _faults(self) -> None:
        while True:
            await asyncio.sleep(_FAULT_POLL_S)
            running_s = clock.monotonic() - self._ran_at if self._ran_at else -1.0
            for hit in faults.due_faults(self._planned, self._view, running_s):
                self._planned.remove(hit.fault)
                print_note(f"{_PREFIX}FAULT, step {self._view.step}: {hit.description}")
                if not await asyncio.to_thread(self._cluster.inject, hit):
                    print_note(f"{_PREFIX}there is no {hit.node} with rank {hit.rank}: no fault was injected")

    async def _events(self, coordinator: CoordinatorClient) -> None:
        request = EventsRequest(gang=gang_ref(self._gang), follow=True)
        async for record in coordinator.events(request):
            if not record.sentinel and record.name not in _OF_SLURM:
                print_note(f"{_PREFIX}{record.text}")

    async def _output(self) -> None:
        while True:
            self._copy()
            await asyncio.sleep(_POLL_S)

    def _copy(self, *, to_end: bool = False) -> None:
        if not self._copies:
            return
        sys.stdout.writelines(self._reader.lines(to_end=to_end))
        sys.stdout.flush()

    async def _guard_cluster(self) -> None:
        """Raises an error if a process of the cluster fails before the gang is final.

        Agents exit as soon as the gang is final. The final view may arrive later than their exit.
        """
        while True:
            words = self._cluster.failure()
            await asyncio.sleep(_FINAL_VIEW_TIMEOUT_S if words else 1.0)
            if words and not self._view.final:
                raise SiteFault(words)


async def _first_error(main: asyncio.Task[None], others: list[asyncio.Task[None]]) -> None:
    """Waits until `main` ends. Raises the first error of `main` or of the other tasks."""
    watched: set[asyncio.Task[None]] = {main, *others}
    try:
        while not main.done():
            done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        main.cancel()
        await asyncio.gather(main, return_exceptions=True)


class Interruption:
    """A signal has ended a run. `number`: which one. `again`: set when another one comes."""

    def __init__(self) -> None:
        self.number = signal.SIGINT
        self.again = threading.Event()

    def meet(self, number: signal.Signals, came: asyncio.Event) -> None:
        """A signal comes."""
        if came.is_set():
            self.again.set()
        else:
            self.number = number
            came.set()


async def run_until_signal(work: Callable[[], Awaitable[GangView]]) -> GangView | Interruption:
    """Runs `work` to its end, or until SIGINT, SIGQUIT (both from the keyboard), SIGTERM or SIGHUP (the terminal was
    closed)."""
    loop, task, stop_requested = asyncio.get_running_loop(), asyncio.ensure_future(work()), asyncio.Event()
    interruption = Interruption()
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interruption.meet, number, stop_requested)
    waiting = asyncio.ensure_future(stop_requested.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    while not task.done():
        # Cancel repeatedly: a call that ends in the same loop iteration consumes the cancellation and continues.
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_INTERVAL_S)
    waiting.cancel()
    return interruption if stop_requested.is_set() or task.cancelled() else task.result()


def check_faults(planned: list[Fault], nodes: int, ranks: int) -> None:
    """Raises WrongInput for a fault whose target is not in a cluster of `nodes` nodes and a gang of `ranks` ranks."""
    for fault in planned:
        if fault.node and fault.node not in {f"n{index}" for index in range(nodes)}:
            raise WrongInput(f"--fault: there is no node {fault.node}; nodes are n0 to n{nodes - 1}")
        if fault.rank >= ranks:
            raise WrongInput(f"--fault: there is no rank {fault.rank}; ranks are 0 to {ranks - 1}")


def make_run_dir(path: Path) -> None:
    """Creates the folder `path` if it does not exist.

    Raises:
        WrongInput: the folder cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongInput(f"--run-dir {path}: {error.strerror}") from None
