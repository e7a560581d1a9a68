"""`muster-agent batch -- srun ...`: what the batch script becomes on the batch host.

The end of the batch script is the end of the job. srun may end long before the gang does (its own death, the death of
the nodes that it watches): so this process starts srun, outlives it, and leaves with the gang's exit code once the
coordinator calls the gang final. It takes nobody's silence for an end.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from muster.daemon.channel import open_channel
from muster.daemon.identity import Credentials
from muster.v1.api_pb2 import GangRef, GangView
from muster.v1.api_pb2_grpc import MusterStub

log = logging.getLogger(__name__)

_CALL_S = 5.0
# Phases in which no agent has done anything yet (docs/STATES.md).
_BEFORE = frozenset({"SUBMITTED", "GATHERING"})


class Coordinator(Protocol):
    """What is asked of the coordinator."""

    async def view(self) -> GangView | None:
        """The gang; None: no answer, or it does not know it (yet)."""
        ...


@dataclass(frozen=True, slots=True)
class Remote:
    """The coordinator at `address`, asked about the gang `gang_id`."""

    address: str
    credentials: Credentials
    gang_id: str

    async def view(self) -> GangView | None:
        """See Coordinator.view."""
        async with open_channel(self.address, self.credentials) as channel:
            try:
                return await MusterStub(channel).Describe(GangRef(gang_id=self.gang_id), timeout=_CALL_S)
            except grpc.aio.AioRpcError as error:
                log.info("the coordinator at %s: %s", self.address, error.details())
                return None


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: between questions after srun's end, and beside it; from the gang's end to srun's, which may hang on a
    node that died."""

    ask: float = 1.0
    ask_beside_srun: float = 2.0
    srun_ends: float = 3.0


_PACE = Pace()


async def batch(argv: Sequence[str], coordinator: Coordinator, pace: Pace = _PACE) -> int:
    """Start `argv` (srun), wait until the gang is final, return its exit code.

    Where srun fails and the coordinator knows of no agent that ever attached: srun's own exit code, with the reason
    logged.
    """
    try:
        srun = await asyncio.create_subprocess_exec(*argv)
    except OSError as error:
        log.error("can't start %s: %s", argv[0], error.strerror)
        return 127
    _pass_on(srun)
    view = await _final_beside(srun, coordinator, pace)
    if view is None:
        return await _after_srun(srun, coordinator, pace)
    try:
        await asyncio.wait_for(srun.wait(), pace.srun_ends)
    except TimeoutError:
        log.warning("the gang is final but srun still runs: it is ended")
        srun.kill()
        await srun.wait()
    return _say_end(view)


async def _final_beside(srun: asyncio.subprocess.Process, coordinator: Coordinator, pace: Pace) -> GangView | None:
    """The gang's view if it becomes final while srun runs; None when srun has ended first."""
    ended = asyncio.ensure_future(srun.wait())
    while not ended.done():
        await asyncio.wait([ended], timeout=pace.ask_beside_srun)
        if not ended.done() and (view := await coordinator.view()) is not None and view.final:
            return view
    return None


async def _after_srun(srun: asyncio.subprocess.Process, coordinator: Coordinator, pace: Pace) -> int:
    code = srun.returncode or 0
    log.info("srun has ended with status %d; waiting for the gang to be final", code)
    while True:
        view = await coordinator.view()
        if view is not None and view.final:
            return _say_end(view)
        if view is not None and code != 0 and _never_started(view):
            log.error(
                "srun failed with status %d before any agent attached: see srun's message above; "
                "is muster-agent installed on every node of the job?",
                code,
            )
            return code if code > 0 else 128 - code
        await asyncio.sleep(pace.ask)


def _never_started(view: GangView) -> bool:
    return (
        view.phase.upper() in _BEFORE and view.generation == 0 and not any(node.agent_attached for node in view.nodes)
    )


def _say_end(view: GangView) -> int:
    log.info("the gang is %s with exit code %d: %s", view.phase, view.exit_code, view.reason or "done")
    return view.exit_code if view.exit_code >= 0 else 128 - view.exit_code


def _pass_on(srun: asyncio.subprocess.Process) -> None:
    """SIGTERM and SIGINT go to srun; the rest, which Slurm may send to a batch shell, harms nobody."""
    loop = asyncio.get_running_loop()

    def tell(signum: int) -> None:
        if srun.returncode is None:
            srun.send_signal(signum)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, tell, number)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
