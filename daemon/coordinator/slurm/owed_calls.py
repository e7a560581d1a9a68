"""Makes the calls that are owed to Slurm: drain, down, requeue, complete and others.

The durable state holds an owed call until it is settled. The calls of one gang are made in the order in which the core
decided them. While Slurm doesn't answer, a call is retried without limit: every call is idempotent. A call that Slurm
refuses is settled with Slurm's error and never retried. Any other error is a bug: it is logged with its traceback, the
call is retried a few times and then settled as refused, so that the gang's other calls continue.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential

from muster.daemon.coordinator.core.detection import drain_reason
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.fact_text import call_words
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.host.lasting_problem import LastingProblem
from muster.node_health import RESUMABLE
from muster.slurm.client.errors import SlurmRefused, SlurmUnavailable
from muster.slurm.client.states import JobState
from muster.slurm.client.types import Gone, Job, Node, Slurm, Unknown

_log = logging.getLogger(__name__)
REQUEUE_DEADLINE_S = 30.0
"""Seconds for a requeue. A job with a dead node needs some 15 s to release its nodes before it is in the queue."""
BUG_ATTEMPTS = 3
"""Attempts at a call that fails with an unexpected error."""
_BUG_RETRY_INTERVAL_S = 0.25
_BACKOFF = wait_exponential(multiplier=0.25, max=5.0)


class OwedCalls:
    """Makes owed calls. `post` gets a SlurmAnswered event for each settled call."""

    def __init__(self, slurm: Slurm, post: Callable[[events.Event], None]) -> None:
        self._slurm = slurm
        self._post = post
        self._started: set[int] = set()
        self._queues: dict[str, deque[facts.SlurmCallOwed]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start_owed(self, state: DurableState) -> None:
        """Start every call that `state` holds as owed and that is not under way."""
        for call in sorted(state.owed.values(), key=lambda call: call.call):
            if call.call not in self._started:
                self._started.add(call.call)
                self._enqueue(call, state)

    async def aclose(self) -> None:
        """Stop. Calls that were not settled stay owed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _enqueue(self, call: facts.SlurmCallOwed, state: DurableState) -> None:
        if call.gang in self._queues:
            self._queues[call.gang].append(call)
            return
        self._queues[call.gang] = deque([call])
        task = asyncio.create_task(self._make_calls(call.gang, state))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _make_calls(self, gang: str, state: DurableState) -> None:
        queue = self._queues[gang]
        try:
            while queue:
                call = queue.popleft()
                error = await self._settle(call, state)
                self._started.discard(call.call)
                self._post(events.SlurmAnswered(gang, call.call, error))
        finally:
            del self._queues[gang]

    async def _settle(self, call: facts.SlurmCallOwed, state: DurableState) -> str | None:
        """Make the call until it is settled. Returns Slurm's refusal or the bug in words, or None."""
        bug = ""
        for _ in range(BUG_ATTEMPTS):
            if bug:
                await asyncio.sleep(_BUG_RETRY_INTERVAL_S)
            try:
                await self._retry_until_answered(call, state)
            except SlurmRefused as refused:
                return str(refused)
            except Exception as error:  # noqa: BLE001  # top level of this task: a bug in one call must not stop other calls
                bug = f"a bug of Muster, not an answer of Slurm: {type(error).__name__}: {error}"
                _log.critical("%s: can't %s: %s", call.gang, call_words(call), bug, exc_info=error)
            else:
                return None
        return bug

    async def _retry_until_answered(self, call: facts.SlurmCallOwed, state: DurableState) -> None:
        what = f"{call.gang}: {call_words(call)}"
        problem = LastingProblem(_log, f"{what}: done")
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(SlurmUnavailable),
            wait=_BACKOFF,
            before_sleep=lambda attempt: problem.meet(
                f"{what}: not done yet, trying again: {attempt.outcome and attempt.outcome.exception()}"
            ),
            reraise=True,
        )
        await retrying(make_call, self._slurm, call, state)
        problem.end()


async def make_call(slurm: Slurm, call: facts.SlurmCallOwed, state: DurableState) -> None:
    """Make `call` once.

    Raises:
        SlurmError: Slurm refused the call or did not answer it.
    """
    match call.verb:
        case "drain":
            if call.if_run_has_node is not None:
                await _check_run_has_node(slurm, call)
            await slurm.drain(call.node, await _reason_to_write(slurm, call, state))
        case "down":
            await slurm.down(call.node, await _reason_to_write(slurm, call, state))
        case "resume":
            await _resume(slurm, call, state)
        case "let_go":
            await slurm.remove_node(call.job, call.node)
        case "requeue":
            await _requeue(slurm, call, state)
        case "admit":
            await _admit(slurm, call, state)
        case "requeue_off":
            await slurm.set_requeue_flag(call.job, False)
        case "complete":
            await slurm.complete_job(call.job, call.exit_code)
        case "cancel":
            await _cancel(slurm, call, state)


async def _check_run_has_node(slurm: Slurm, call: facts.SlurmCallOwed) -> None:
    """Raises SlurmRefused: this run of the job no longer has the node, which may belong to another user's job now."""
    found = await _look_up(slurm, call.job)
    held = () if isinstance(found, Gone) or found.restart_count != call.if_run_has_node else found.held_nodes
    if call.node not in held:
        raise SlurmRefused(f"drain {call.node}", f"job {call.job} no longer has this node")


async def _reason_to_write(slurm: Slurm, call: facts.SlurmCallOwed, state: DurableState) -> str:
    """Muster's reason. If somebody else has drained the node since Slurm was last asked, theirs: Muster resumes only a
    node whose drain has Muster's reason."""
    if not call.resumable:
        return call.text
    found = await _look_up_node(slurm, call.node)
    if isinstance(found, Gone) or not found.drained:
        return call.text
    own = (call.text, state.node(call.node).drained_as)
    return call.text if any(drain_reason.is_same(found.reason, text) for text in own) else found.reason


async def _resume(slurm: Slurm, call: facts.SlurmCallOwed, state: DurableState) -> None:
    """Resume the node, if what Muster decided on has not changed.

    Raises SlurmRefused: the node has failed otherwise meanwhile, or somebody else has changed its drain.
    """
    operation, known = f"resume {call.node}", state.node(call.node)
    if known.health not in RESUMABLE or known.drain is not None:
        raise SlurmRefused(operation, f"the node is {known.health} meanwhile, or an operator drains it")
    found = await _look_up_node(slurm, call.node)
    if isinstance(found, Gone) or not found.drained:
        return  # somebody has resumed it, or an earlier coordinator has, which ended before it noted the answer
    if not drain_reason.is_same(found.reason, call.text):
        raise SlurmRefused(operation, f"somebody has changed the reason of its drain: {found.reason}")
    await slurm.resume(call.node)


async def _cancel(slurm: Slurm, call: facts.SlurmCallOwed, state: DurableState) -> None:
    gang = state.gangs.get(call.gang)
    if gang is None or call.job != gang.slurm.job:
        # An agent reported the id of this pool job. A user must not cancel another user's job through the coordinator.
        found = await _look_up(slurm, call.job)
        if isinstance(found, Gone):
            return
        if gang is None or found.user_id != gang.account.owner_uid:
            raise SlurmRefused(f"cancel job {call.job}", "the job does not belong to the gang's user")
    await slurm.cancel(call.job)


async def _requeue(slurm: Slurm, call: facts.SlurmCallOwed, state: DurableState) -> None:
    gang = state.gangs.get(call.gang)
    if gang is not None and gang.phase in (Phase.REQUEUED, Phase.SUBMITTED):
        await _requeue_with_nodes(slurm, call, gang)
    # Otherwise the job runs again: an earlier coordinator made the call and ended before it noted the answer.


async def _admit(slurm: Slurm, call: facts.SlurmCallOwed, state: DurableState) -> None:
    gang = state.gangs.get(call.gang)
    starting = gang is not None and gang.phase is Phase.GATHERING and not gang.roster.members
    if gang is None or not (starting or gang.phase is Phase.REQUEUED):
        return  # the job runs: its excluded nodes no longer matter
    if _is_requeued_again(call, state):
        return  # the job ran meanwhile; the next requeue sets the nodes on which it may start
    if starting or not await _is_pending(slurm, call.job):
        # Slurm has started the job, and no agent has attached yet. If the job is requeued, its nodes are still
        # excluded.
        raise SlurmUnavailable(f"job {call.job} is not pending now")
    await _requeue_with_nodes(slurm, call, gang)


async def _requeue_with_nodes(slurm: Slurm, call: facts.SlurmCallOwed, gang: Gang) -> None:
    await slurm.requeue(
        call.job, call.exclude, call.admit, restarts=gang.slurm.restart_count, timeout_s=REQUEUE_DEADLINE_S
    )


def _is_requeued_again(call: facts.SlurmCallOwed, state: DurableState) -> bool:
    later = (owed for number, owed in state.owed.items() if number > call.call)
    return any(owed.gang == call.gang and owed.verb == "requeue" for owed in later)


async def _is_pending(slurm: Slurm, job: int) -> bool:
    found = await _look_up(slurm, job)
    return isinstance(found, Gone) or found.state.ended or found.state is JobState.PENDING


async def _look_up_node(slurm: Slurm, node: str) -> Node | Gone:
    answer = await slurm.nodes({node})
    found = answer if isinstance(answer, Unknown) else answer[node]
    if isinstance(found, Unknown):
        raise SlurmUnavailable(found.reason)
    return found


async def _look_up(slurm: Slurm, job: int) -> Job | Gone:
    answer = await slurm.jobs({job})
    found = answer if isinstance(answer, Unknown) else answer[job]
    if isinstance(found, Unknown):
        raise SlurmUnavailable(found.reason)
    return found
