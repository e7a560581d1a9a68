"""`muster-agent batch -- srun ...`: what the batch script becomes on the batch host.

The end of the batch script is the end of the job. srun may end long before the gang does (its own death, the death of
the nodes that it watches): so this process starts srun, outlives it, and leaves with the gang's exit code once the
coordinator calls the gang final. It leaves as well once Slurm has put the job back into its queue: the job can't start
again before. It takes nobody's silence for an end.

A coordinator that answers, and knows no such gang, is not silent: the gang was never registered (`muster submit
--force`, and no agent got as far as attaching), or it is long over and forgotten. Once srun has ended, nobody is left
who could register it but agents that are on their way: they get a while, then the job ends with srun's code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import grpc
import grpc.aio

from muster.daemon.agent.batch.srun import MAX_REQUEUES, Allocation, Srun, requeue
from muster.daemon.transport.channel import open_first_ready_channel
from muster.daemon.transport.identity import Credentials
from muster.daemon.transport.site_config import split_addresses
from muster.v1.api_pb2 import BatchRef, GangView
from muster.v1.api_pb2_grpc import MusterStub

log = logging.getLogger(__name__)

_CALL_S = 5.0
EXIT_REQUEUED = 75
"""EX_TEMPFAIL of sysexits.h. Slurm does not look at it, for the job waits already; should it have lost that, no job
that depends on this one may take it for done."""
_SIGNALS = 128
MAX_LAUNCHES = 3
"""srun is started so often, where nothing tells which node it is that takes it down."""
_ENDS = frozenset({"DONE", "FAILED", "CANCELLED"})
# Phases in which no agent of this run of the job has done anything yet (docs/STATES.md).
_BEFORE = frozenset({"SUBMITTED", "GATHERING"})


class ViewFailure(Enum):
    """Why there is no view of the gang."""

    NO_ANSWER = "the coordinator does not answer, or not us"
    UNKNOWN_GANG = "the coordinator answers that it knows no such gang"


class Coordinator(Protocol):
    """What is asked of the coordinator."""

    async def view(self) -> GangView | ViewFailure:
        """The gang, or why there is none to be seen."""
        ...


@dataclass(frozen=True, slots=True)
class RemoteCoordinator:
    """The coordinator at `address` (or at one of several, with commas), asked by the batch process of `run`."""

    address: str
    credentials: Credentials
    run: BatchRef

    async def view(self) -> GangView | ViewFailure:
        """See Coordinator.view."""
        async with await open_first_ready_channel(split_addresses(self.address), self.credentials) as channel:
            try:
                return await MusterStub(channel).Attend(self.run, timeout=_CALL_S)
            except grpc.aio.AioRpcError as error:
                log.info("the coordinator at %s: %s", self.address, error.details())
                return ViewFailure.UNKNOWN_GANG if error.code() is grpc.StatusCode.NOT_FOUND else ViewFailure.NO_ANSWER


@dataclass(frozen=True, slots=True)
class PollTiming:
    """Seconds: between questions after srun's end, and beside it; from the gang's end to srun's, which may hang on a
    node that died. `unknown`: how many answers in a row, after srun's end, that there is no such gang."""

    poll_s: float = 1.0
    poll_beside_srun_s: float = 2.0
    srun_exit_s: float = 3.0
    # From SIGKILL to the end of srun, which the kernel delays where srun waits for a dead file server.
    srun_kill_s: float = 3.0
    # Two minutes: an agent on its way is let in within one, though Slurm be slow to tell the coordinator who it is.
    unknown_gang_answers: int = 120
    # As many that agents were there and none is: after a coordinator's restart they attach anew within seconds.
    no_agent_answers: int = 20


_PACE = PollTiming()


async def run_batch(
    argv: Sequence[str], coordinator: Coordinator, allocation: Allocation | None = None, pace: PollTiming = _PACE
) -> int:
    """Start `argv` (srun), wait until the gang is final, return its exit code, or EXIT_REQUEUED.

    Where srun finds nodes of `allocation` dead, it is started again without them, or the job is requeued where too few
    are left. A launch that a dying node took down is tried again, too, for a while. Where it fails otherwise and the
    coordinator knows of no agent that attached to stay, or where srun has ended and the coordinator goes on knowing no
    such gang: srun's own exit code, with the reason logged.
    """
    allocation, lost, launches = allocation or Allocation(), set[str](), 0
    while True:
        launches += 1
        try:
            srun = await Srun.start(allocation.command(argv, sorted(lost)))
        except OSError as error:
            log.error("can't start %s: %s", argv[0], error.strerror)
            return 127
        _pass_on(srun.process)
        view = await _final_beside(srun, coordinator, pace)
        if view is not None:
            await _end(srun, pace)
            return _say_end(view)
        code = await srun.wait()
        found = srun.failed_nodes - lost
        lost |= found
        if code and found and await _goes_on(allocation, lost):
            continue
        more = bool(allocation.min_nodes) and not found and launches < MAX_LAUNCHES
        ended = await _after_srun(code, coordinator, pace, more)
        if ended is not None:
            return ended


async def _goes_on(allocation: Allocation, lost: set[str]) -> bool:
    """Nodes enough are left without `lost`. If not, the job goes back into the queue where it may."""
    names, left = ", ".join(sorted(lost)), allocation.node_count - len(lost)
    if left >= allocation.min_nodes > 0:
        log.warning("srun could start nothing on %s: it is started again on the other %d nodes", names, left)
        return True
    if allocation.min_nodes:
        log.error("srun could start nothing on %s: %d nodes are left of %d", names, left, allocation.min_nodes)
    # Where nothing can be started on this very node, which lives, it is no dead node that srun speaks of.
    may = allocation.may_requeue and allocation.batch_host not in lost and allocation.restart_count < MAX_REQUEUES
    if allocation.min_nodes and may:
        refused = await requeue(allocation)
        log.warning("job %d %s", allocation.job_id, f"can't be requeued: {refused}" if refused else "is requeued")
    return False


async def _end(srun: Srun, pace: PollTiming) -> None:
    if not await srun.ends_within(pace.srun_exit_s):
        log.warning("the gang is over but srun still runs: it is ended")
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            srun.process.kill()
        if not await srun.ends_within(pace.srun_kill_s):
            log.error("srun does not end: it is left behind")
            return
    await srun.wait()


async def _final_beside(srun: Srun, coordinator: Coordinator, pace: PollTiming) -> GangView | None:
    """The gang's view if it becomes final while srun runs; None when srun has ended first."""
    ended = asyncio.ensure_future(srun.process.wait())
    while not ended.done():
        # At once as well: what has been heard can be missed, where this host dies.
        if isinstance(view := await coordinator.view(), GangView) and view.final and not ended.done():
            return view
        await asyncio.wait([ended], timeout=pace.poll_beside_srun_s)
    return None


async def _after_srun(code: int, coordinator: Coordinator, pace: PollTiming, more: bool) -> int | None:
    """The exit code; None: no agent is left, and srun may be tried once more."""
    log.info("srun has ended with status %d; waiting for the gang to be final", code)
    unknown = gone = 0
    while True:
        view = await coordinator.view()
        unknown = unknown + 1 if view is ViewFailure.UNKNOWN_GANG else 0
        if isinstance(view, GangView) and view.final:
            return _say_end(view)
        left = isinstance(view, GangView) and _gathers_without_agents(view)
        gone = gone + 1 if left else 0
        if isinstance(view, GangView) and code != 0 and left and (gone >= pace.no_agent_answers or not _came(view)):
            when = "and its agents are gone" if _came(view) else "before any agent attached"
            if more and _killed(code):
                log.warning("srun was taken down with status %d %s: it is started again", code, when)
                return None
            log.error(
                "srun failed with status %d %s: see srun's message above; "
                "is muster-agent installed on every node of the job?",
                code,
                when,
            )
            return _exit_code(code)
        if unknown >= pace.unknown_gang_answers:
            log.error(
                "srun has ended with status %d, and the coordinator goes on knowing no such gang: no agent ever "
                "attached, or the gang was over long ago. See what srun and the agents say above; is muster-agent "
                "installed on every node of the job? Mend that, then submit anew with muster",
                code,
            )
            return _exit_code(code)
        await asyncio.sleep(pace.poll_s)


def _killed(code: int) -> bool:
    """The step's tasks, or srun, were killed: no agent has left of its own accord."""
    return code < 0 or code > _SIGNALS


def _gathers_without_agents(view: GangView) -> bool:
    return view.phase.upper() in _BEFORE and not any(node.agent_attached for node in view.nodes)


def _came(view: GangView) -> bool:
    """An agent of this run of the job has attached, be it gone again."""
    return any(node.role != "absent" for node in view.nodes)


def _say_end(view: GangView) -> int:
    if view.phase not in _ENDS:
        log.info("this run of the job is over, it starts again: %s", view.reason or "Slurm has requeued it")
        return EXIT_REQUEUED
    log.info("the gang is %s with exit code %d: %s", view.phase, view.exit_code, view.reason or "done")
    return _exit_code(view.exit_code)


def _exit_code(status: int) -> int:
    """As a shell says it: minus a signal's number becomes 128 plus that number."""
    return status if status >= 0 else 128 - status


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
