"""One run of a gang on a local cluster: watch it, show what happens, inject faults when they are due, clean up."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from muster.daemon.host import clock, rank_log_files
from muster.daemon.transport.identity import SecretCredentials
from muster.launcher.command import note
from muster.launcher.coordinator import Coordinator, gang_ref
from muster.launcher.errors import SiteFault, Unavailable, WrongInput
from muster.launcher.local import faults
from muster.launcher.local.cluster import LocalCluster
from muster.launcher.local.faults import Fault
from muster.launcher.output.rank_logs import Reader
from muster.v1.api_pb2 import EventsRequest, GangView

_START_S = 30.0
_LAST_VIEW_S = 10.0
_CANCEL_AGAIN_S = 0.5
_LOOK_S = 0.1
_FAULT_S = 0.02
_EVENT = "muster: "


class LocalRun:
    """Follows the gang `gang` of `cluster` to its end."""

    def __init__(self, cluster: LocalCluster, gang: str, run_dir: str, planned: list[Fault]) -> None:
        self._cluster, self._gang = cluster, gang
        self._planned = planned
        self._reader = Reader(rank_log_files.log_folder(run_dir, gang), 0, 0)
        self._view = GangView()
        self._ran_at = 0.0

    async def follow(self) -> GangView:
        """Until the gang is final; its last view.

        Raises:
            LauncherError: the cluster itself broke.
        """
        coordinator = Coordinator(self._cluster.address, SecretCredentials(self._cluster.secret))
        async with coordinator:
            await self._begin(coordinator)
            tasks = [
                asyncio.create_task(work)
                for work in (self._events(coordinator), self._output(), self._faults(), self._guard_cluster())
            ]
            try:
                await _first_error(asyncio.create_task(self._watch(coordinator)), tasks)
                await asyncio.wait([tasks[0]], timeout=1.0)  # the last events are on their way
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._copy(to_end=True)
        for fault in self._planned:
            note(f"{_EVENT}{faults.missed(fault, self._view.step)}")
        return self._view

    async def _begin(self, coordinator: Coordinator) -> None:
        """Until the first agent has made the gang known."""
        deadline = clock.monotonic() + _START_S
        while True:
            # Looked at first: a gang that ends at once is known by the time its agents have left.
            words = self._cluster.broken()
            try:
                if await coordinator.knows(self._gang):
                    return
                settled = True
            except Unavailable:
                settled = self._cluster.without_coordinator  # else it is only starting, or so is our connection
            if words and settled:
                raise SiteFault(words)
            if clock.monotonic() > deadline:
                raise Unavailable(f"no local agent has attached within {_START_S:g} s")
            await asyncio.sleep(_LOOK_S)

    async def _watch(self, coordinator: Coordinator) -> None:
        async for view in coordinator.watch(gang_ref(self._gang)):
            self._view = view
            if view.phase == "RUNNING" and not self._ran_at:
                self._ran_at = clock.monotonic()

    async def _faults(self) -> None:
        while True:
            await asyncio.sleep(_FAULT_S)
            running_s = clock.monotonic() - self._ran_at if self._ran_at else -1.0
            for hit in faults.due(self._planned, self._view, running_s):
                self._planned.remove(hit.fault)
                note(f"{_EVENT}FAULT, step {self._view.step}: {hit.text}")
                if not await asyncio.to_thread(self._cluster.inject, hit):
                    note(f"{_EVENT}there is no {hit.node} with rank {hit.rank}: nothing was hit")

    async def _events(self, coordinator: Coordinator) -> None:
        request = EventsRequest(gang=gang_ref(self._gang), follow=True)
        async for record in coordinator.events(request):
            if not record.sentinel:
                note(f"{_EVENT}{record.text}")

    async def _output(self) -> None:
        while True:
            self._copy()
            await asyncio.sleep(_LOOK_S)

    def _copy(self, *, to_end: bool = False) -> None:
        sys.stdout.writelines(self._reader.lines(to_end=to_end))
        sys.stdout.flush()

    async def _guard_cluster(self) -> None:
        """Ends with an error when the cluster breaks before the gang is final. Agents leave the moment the gang is; the
        view that says so may come later than their end."""
        while True:
            words = self._cluster.broken()
            await asyncio.sleep(_LAST_VIEW_S if words else 1.0)
            if words and not self._view.final:
                raise SiteFault(words)


async def _first_error(main: asyncio.Task[None], others: list[asyncio.Task[None]]) -> None:
    """Until `main` ends; raises what ended it or any of the others before."""
    watched: set[asyncio.Task[None]] = {main, *others}
    try:
        while not main.done():
            done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        main.cancel()
        await asyncio.gather(main, return_exceptions=True)


async def interruptible(work: Callable[[], Awaitable[GangView]]) -> GangView | None:
    """`work` to its end, or None after SIGINT, SIGTERM or SIGHUP (a terminal that was closed)."""
    loop, task, told = asyncio.get_running_loop(), asyncio.ensure_future(work()), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, told.set)
    waiting = asyncio.ensure_future(told.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    while not task.done():
        # Again and again: a call that ends in the same turn takes the cancellation for its own, and goes on.
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_AGAIN_S)
    waiting.cancel()
    return None if told.is_set() or task.cancelled() else task.result()


def check_faults(planned: list[Fault], nodes: int, ranks: int) -> None:
    """Raises WrongInput for a fault that hits nothing in a cluster of `nodes` nodes and a gang of `ranks` ranks."""
    for fault in planned:
        if fault.node and fault.node not in {f"n{index}" for index in range(nodes)}:
            raise WrongInput(f"--fault: there is no node {fault.node}; nodes are n0 to n{nodes - 1}")
        if fault.rank >= ranks:
            raise WrongInput(f"--fault: there is no rank {fault.rank}; ranks are 0 to {ranks - 1}")


def must_be_dir(path: Path) -> None:
    """Make `path` where it is missing.

    Raises:
        WrongInput: it can't be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongInput(f"--run-dir {path}: {error.strerror}") from None
