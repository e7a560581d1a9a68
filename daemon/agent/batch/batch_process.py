"""`muster-agent batch -- srun ...`: the process that the batch script becomes on the batch host.

When the batch script ends, the job ends. srun may end long before the gang does, for example when srun or a node dies.
So this process starts srun and outlives it. It exits with the gang's exit code as soon as the coordinator reports that
the gang is final. It also exits as soon as Slurm has requeued the job, because the job can't start again before. A
coordinator that does not answer never ends the job.

The coordinator may answer that it does not know the gang. Either the gang was never registered (`muster submit
--force`, and no agent attached), or the gang ended long ago and was forgotten. After srun's end, only agents that are
still on their way could register the gang. This process waits for them for a while, then exits with srun's exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol

import grpc
import grpc.aio

from muster import exit_codes
from muster.daemon.agent.batch import asked_segments
from muster.daemon.agent.batch.srun import (
    ALL_LAUNCHED,
    MAX_REQUEUES,
    Allocation,
    Srun,
    Step,
    requeue,
)
from muster.daemon.host.process import step_signals
from muster.daemon.transport.channel import open_first_ready_channel
from muster.daemon.transport.identity import Credentials
from muster.daemon.transport.server_limits import ORDER_BYTES
from muster.daemon.transport.site_config import split_addresses
from muster.daemon.transport.tls import Trust, explain
from muster.v1.api_pb2 import BatchRef, GangView
from muster.v1.api_pb2_grpc import MusterStub

log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 5.0
EXIT_REQUEUED = 75
"""EX_TEMPFAIL of sysexits.h. Slurm ignores this status, because the job is queued again. If Slurm has lost the requeue,
a status other than 0 keeps dependent jobs from starting."""
EXIT_NOT_OWN_GANG = 64
"""EX_USAGE. A user has queued a rendered script once more: its gang has a job, and this one would hold nodes."""
_SIGNAL_EXIT_BASE = 128
MAX_LAUNCHES = 3
"""srun is started at most this often if nothing shows which node ends it."""
_FINAL_PHASES = frozenset({"DONE", "FAILED", "CANCELLED"})
# Phases in which no agent of this run has done anything yet (docs/STATES.md).
_PHASES_BEFORE_RUN = frozenset({"SUBMITTED", "GATHERING"})


class ViewFailure(Enum):
    """Why there is no view of the gang."""

    NO_ANSWER = "the coordinator does not answer this process"
    UNKNOWN_GANG = "the coordinator does not know the gang"


class Coordinator(Protocol):
    """What this process asks the coordinator for."""

    async def view(self, launch: BatchRef = ALL_LAUNCHED) -> GangView | ViewFailure:
        """Return the gang, or why there is no view of it."""
        ...


@dataclass(frozen=True, slots=True)
class RemoteCoordinator:
    """The coordinator at `address` (several addresses: separated by commas), asked by the batch process of `run`."""

    address: str
    credentials: Credentials
    run: BatchRef
    trust: Trust | None = None

    async def view(self, launch: BatchRef = ALL_LAUNCHED) -> GangView | ViewFailure:
        """See Coordinator.view."""
        run = BatchRef()
        run.CopyFrom(launch)
        run.MergeFrom(self.run)
        addresses = split_addresses(self.address)
        async with await open_first_ready_channel(
            addresses, self.credentials, trust=self.trust, receive_bytes=ORDER_BYTES
        ) as channel:
            try:
                return await MusterStub(channel).Attend(run, timeout=_CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                log.info("the coordinator at %s: %s", self.address, explain(error.details() or "", self.trust))
                return ViewFailure.UNKNOWN_GANG if error.code() is grpc.StatusCode.NOT_FOUND else ViewFailure.NO_ANSWER


@dataclass(frozen=True, slots=True)
class PollTiming:
    """How often and how long to wait.

    poll_s: seconds between two views after srun's end.
    poll_beside_srun_s: seconds between two views while srun runs.
    srun_exit_s: seconds from the gang's end to srun's end, in which srun writes nothing. It may block on a dead node.
    srun_kill_s: seconds to wait after SIGKILL.
    """

    poll_s: float = 1.0
    poll_beside_srun_s: float = 2.0
    srun_exit_s: float = 3.0
    # From SIGKILL to the end of srun, which the kernel delays if srun waits for a dead file server.
    srun_kill_s: float = 3.0
    # After srun's end: consecutive answers that the gang is unknown. Two minutes: an agent on its way attaches within
    # one, even if Slurm is slow to confirm its identity.
    unknown_gang_answers: int = 120
    # Consecutive answers that the agents have left. After a restart of the coordinator agents attach again within
    # seconds.
    no_agent_answers: int = 20
    # Consecutive answers after which a coordinator that has heard of nodes without an agent requeues no job for them.
    requeue_answers: int = 5
    # Answers for which the end of a gang is awaited whose launch the user has ended.
    interrupt_answers: int = 20
    # Seconds from SIGTERM until it is taken for the user's. Slurm's own reaches the agents, too, and counts.
    sigterm_s: float = 1.0


_DEFAULT_TIMING = PollTiming()
LAUNCH_OF_SCRIPT = PollTiming(srun_exit_s=20.0, unknown_gang_answers=20)
"""For what a user's own script launches. Behind the gang's end, agents copy the rest of the output, and a wrapper goes
on behind its launcher. A launcher that fails at once leaves no gang."""


async def run_batch(
    argv: Sequence[str],
    coordinator: Coordinator,
    allocation: Allocation | None = None,
    timing: PollTiming = _DEFAULT_TIMING,
    forwarded: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
    ends_step: bool = False,
) -> int:
    """Run `argv` (srun) and wait until the gang is final; return its exit code, or EXIT_REQUEUED.

    If srun finds dead nodes in `allocation`, srun is started again without them; if too few nodes are left, the job is
    requeued. A launch is also repeated if a dying node has killed it, or if this host could not reach slurmctld.
    srun is started MAX_LAUNCHES times at most. In two cases the result is srun's own exit code, with the reason in
    the log: the launch fails otherwise and no agent stays attached; or srun has ended and the coordinator still does
    not know the gang. `ends_step`: SIGINT and SIGTERM end the launch and not the job; they go to ranks and agents, and
    not through srun. The result is 130 or 143 then.
    """
    allocation, lost_nodes, launches = allocation or Allocation(), set[str](), 0
    while True:
        launches += 1
        try:
            # A terminal sends Ctrl-C to a process group. srun would take it, and what is passed on, for two.
            srun = await Srun.start(allocation.command(argv, sorted(lost_nodes)), 0 if ends_step else None)
        except OSError as error:
            log.error("can't start %s: %s", argv[0], error.strerror)
            return 127
        step = Step(allocation, srun)
        if launches == 1:  # beside srun, which takes longer
            step.beside.append(asyncio.create_task(asked_segments.say_if_split(step)))
        _forward_signals(step, forwarded, partial(_end_step, step, coordinator, timing) if ends_step else None)
        may_relaunch = bool(allocation.min_nodes) and launches < MAX_LAUNCHES
        try:
            ended = await _code_of_launch(step, srun, coordinator, timing, lost_nodes, may_relaunch=may_relaunch)
        finally:
            await step.close()
        if ended is not None:
            return ended


async def _code_of_launch(
    step: Step, srun: Srun, coordinator: Coordinator, timing: PollTiming, lost_nodes: set[str], *, may_relaunch: bool
) -> int | None:
    """Wait for the end of what srun launches. Return the exit code; None: srun is to be started again without
    `lost_nodes`, to which those are added that srun finds."""
    allocation = step.allocation
    view = await _poll_beside_srun(step, srun, coordinator, timing, lost_nodes)
    if view is not None:
        await _wait_or_kill(srun, timing)
        return _code_of(view, step.interrupted)
    code = await srun.wait()
    if code and signal.SIGINT in step.asked_to_end:
        code = exit_codes.EXIT_CANCELLED
    found = srun.failed_nodes - lost_nodes
    lost_nodes |= found
    if code and found and not step.asked_to_end:
        if _enough_nodes_left(allocation, lost_nodes):
            return None
        await _requeue_job(step, lost_nodes, coordinator, timing)
    started_nothing = _was_killed(code) or srun.controller_unreachable
    again = may_relaunch and started_nothing and not (found or step.asked_to_end)
    return await _poll_after_srun(code, coordinator, timing, step, may_relaunch=again)


def pass_signals_on(
    step: Step, coordinator: Coordinator, timing: PollTiming, forwarded: Sequence[signal.Signals]
) -> None:
    """From now on, signals go to a step whose launch was killed, as they went while that lived."""
    _forward_signals(step, forwarded, partial(_end_step, step, coordinator, timing))


async def wait_for_gang(code: int, coordinator: Coordinator, timing: PollTiming, step: Step) -> int:
    """Wait until the gang of `step` is final, whose launch has ended with `code`, and return its exit code. `code`: if
    the gang has no agent any more, or is forgotten."""
    try:
        ended = await _poll_after_srun(code, coordinator, timing, step, may_relaunch=False)
    finally:
        await step.close()
    return code if ended is None else ended


def _enough_nodes_left(allocation: Allocation, lost_nodes: set[str]) -> bool:
    """Return whether srun can start the gang without `lost_nodes`."""
    names, left = ", ".join(sorted(lost_nodes)), allocation.node_count - len(lost_nodes)
    if left >= allocation.min_nodes > 0:
        log.warning("srun could start nothing on %s: starting srun again on the other %d nodes", names, left)
        return True
    if allocation.min_nodes:
        log.error("srun could start nothing on %s: only %d of %d nodes are left", names, left, allocation.min_nodes)
    return False


async def _requeue_job(step: Step, lost_nodes: set[str], coordinator: Coordinator, timing: PollTiming) -> None:
    """Have the job requeued, if that is allowed. The coordinator does it without `lost_nodes`; if it does not, this
    process asks Slurm."""
    for _ in range(timing.requeue_answers):
        view = await coordinator.view(step.told(lost_nodes))
        if isinstance(view, GangView) and view.final:
            return
        await asyncio.sleep(timing.poll_s)
    allocation = step.allocation
    # If srun can start nothing on this live node, the fault is not a dead node: do not requeue.
    may = allocation.may_requeue and allocation.batch_host not in lost_nodes and allocation.restart_count < MAX_REQUEUES
    if allocation.min_nodes and may:
        refused = await requeue(allocation)
        log.warning("job %d %s", allocation.job_id, f"can't be requeued: {refused}" if refused else "is requeued")


async def _wait_or_kill(srun: Srun, timing: PollTiming) -> None:
    if not await srun.ends_or_is_silent(timing.srun_exit_s):
        log.warning("the gang has ended but srun still runs: killing srun")
        with contextlib.suppress(ProcessLookupError):  # the process has just ended by itself
            srun.process.kill()
        if not await srun.ends_within(timing.srun_kill_s):
            log.error("srun does not end after SIGKILL: not waiting any longer")
            return
    await srun.wait()


async def _poll_beside_srun(
    step: Step, srun: Srun, coordinator: Coordinator, timing: PollTiming, lost_nodes: set[str]
) -> GangView | None:
    """Return the gang's view if the gang becomes final while srun runs; None if srun ends first."""
    ended = asyncio.ensure_future(srun.process.wait())
    while not ended.done():
        # Ask at once too: this host may die before the first interval has passed.
        view = await coordinator.view(step.told(lost_nodes, srun.exit_codes))
        if isinstance(view, GangView) and view.final and not ended.done():
            return view
        await asyncio.wait([ended], timeout=timing.poll_beside_srun_s)
    return None


async def _poll_after_srun(
    code: int, coordinator: Coordinator, timing: PollTiming, step: Step, *, may_relaunch: bool
) -> int | None:
    """Poll after srun's end; if the user has ended it, not for ever. Return the exit code; None: no agent is left, and
    srun may be started again."""
    log.info("srun has ended with status %d; waiting for the gang to be final", code)
    unknown, no_agent_count, answers, job, ended_by = 0, 0, 0, step.allocation.job_id, step.interrupted
    is_told = code >= 0 or ended_by is not None
    while True:
        view = await coordinator.view(step.told())
        is_unknown = view is ViewFailure.UNKNOWN_GANG or (isinstance(view, GangView) and view.awaits_launch)
        unknown = unknown + 1 if is_unknown else 0
        if isinstance(view, GangView) and view.final:
            return _code_of(view, step.interrupted)
        if isinstance(view, GangView) and view.slurm_job_ids and job and job not in view.slurm_job_ids:
            of = view.slurm_job_ids[0]
            log.error("the gang belongs to job %d, not to this job: submit it with muster, not its script", of)
            return EXIT_NOT_OWN_GANG
        attached, answers = isinstance(view, GangView) and _any_agent_attached(view), answers + 1
        none_was_there = view is not ViewFailure.NO_ANSWER and not attached
        if ended_by and (none_was_there or answers >= timing.interrupt_answers):
            return exit_codes.of_shell(-ended_by)
        left = isinstance(view, GangView) and _gathers_without_agents(view)
        if not is_told and isinstance(view, GangView) and not is_unknown and not left:
            is_told = True
            log.warning(
                "srun was ended by signal %d, and the ranks go on. From now on their output is in their logs alone",
                -code,
            )
        no_agent_count = no_agent_count + 1 if left else 0
        if code != 0 and left and (no_agent_count >= timing.no_agent_answers or not attached):
            when = "and its agents are gone" if attached else "before any agent attached"
            if may_relaunch and not step.asked_to_end:
                log.warning("srun ended with status %d %s: starting srun again", code, when)
                return None
            log.error(
                "srun failed with status %d %s. The messages of srun and of the agents above say why: a command of the "
                "job that fails before it launches anything, or a node without muster-agent",
                code,
                when,
            )
            return exit_codes.of_shell(-step.interrupted if step.interrupted else code)
        if unknown >= timing.unknown_gang_answers:
            log.error(
                "srun has ended with status %d, and the coordinator knows of no agent: none ever attached, "
                "or the gang ended long ago. The messages of srun and of the agents above say why: a command of the "
                "job that fails before it launches anything, or a node without muster-agent. Correct that, then submit "
                "again with muster",
                code,
            )
            return exit_codes.of_shell(-step.interrupted if step.interrupted else code)
        await asyncio.sleep(timing.poll_s)


def _was_killed(code: int) -> bool:
    """A signal ended the step's tasks, or srun: no agent has left by itself."""
    return code < 0 or code > _SIGNAL_EXIT_BASE


def _gathers_without_agents(view: GangView) -> bool:
    return view.phase.upper() in _PHASES_BEFORE_RUN and not any(node.agent_attached for node in view.nodes)


def _any_agent_attached(view: GangView) -> bool:
    """Return whether an agent of this run has attached, even if it has left since."""
    return any(node.role != "absent" for node in view.nodes)


def _log_result(view: GangView) -> int:
    if view.phase not in _FINAL_PHASES:
        log.info("this run of the job has ended and the job starts again: %s", view.reason or "Slurm has requeued it")
        return EXIT_REQUEUED
    # The output of the job is where its user looks first.
    say = log.error if view.phase == "FAILED" else log.info
    say("the gang is %s with exit code %d: %s", view.phase, view.exit_code, view.reason or "done")
    return exit_codes.of_shell(view.exit_code)


async def _end_step(step: Step, coordinator: Coordinator, timing: PollTiming, number: signal.Signals) -> None:
    if number is signal.SIGTERM and step.outlives_srun:
        await asyncio.sleep(timing.sigterm_s)
    elif number is signal.SIGTERM and step.srun is not None and await step.srun.ends_within(timing.sigterm_s):
        return
    if step.is_over:
        return
    step.interrupted = number
    log.warning("%s: the ranks are to end; once more to kill them", number.name)
    view = await coordinator.view(step.told())
    # An agent that has only started loses the signal, and there is no rank yet that would save anything.
    early = view is ViewFailure.UNKNOWN_GANG or (isinstance(view, GangView) and _gathers_without_agents(view))
    refused = "" if early else await step.signal(number)
    if step.is_over:  # Slurm refuses a signal for a step that has ended
        return
    if refused:
        log.warning("no signal was sent to the ranks, which are killed: %s", refused)
    if refused or early:
        await _kill_step(step)


async def _kill_step(step: Step) -> None:
    if not step.signal_srun(signal.SIGTERM):
        await _signal_step(step, signal.SIGKILL)


async def _signal_step(step: Step, number: signal.Signals) -> None:
    if refused := await step.signal(number):
        log.warning("%s was not sent to the ranks: %s", number.name, refused)


def _code_of(view: GangView, interrupted: signal.Signals | None) -> int:
    """The exit code of a launch, which a signal was to end if `interrupted`. Its gang may have ended before."""
    if interrupted and view.exit_code == exit_codes.EXIT_STOPPED:
        return exit_codes.of_shell(-interrupted)
    return _log_result(view)


def _forward_signals(
    step: Step,
    forwarded: Sequence[signal.Signals],
    end_step: Callable[[signal.Signals], Coroutine[Any, Any, None]] | None,
) -> None:
    """Forward these signals to srun. Ignore the others that Slurm may send to a batch shell. `end_step`: what SIGINT
    and SIGTERM do the first time; the second time the step is killed. The step then gets signals also if srun was
    killed."""
    loop = asyncio.get_running_loop()

    def tell(signum: signal.Signals) -> None:
        has_srun = step.srun is not None and step.srun.process.returncode is None
        if not has_srun and (end_step is None or not step.outlives_srun):
            return
        ends, again = signum in (signal.SIGTERM, signal.SIGINT), bool(step.asked_to_end)
        step.asked_to_end |= {signum} if ends else set()
        if end_step is not None and ends:
            step.beside.append(asyncio.ensure_future(_kill_step(step) if again else end_step(signum)))
        elif not step.signal_srun(signum):
            step.beside.append(asyncio.ensure_future(_signal_step(step, signum)))

    step_signals.ignore()
    for number in forwarded:
        loop.add_signal_handler(number, tell, number)
