"""Carries out what is owed to Slurm: drains, downs, requeues, completions.

A call is owed in the durable state until it is settled. Calls of one gang go out in the order in which they were owed.
While Slurm doesn't answer, a call is given again, for as long as it takes: all of them are idempotent. What Slurm
refuses is settled with its words and never tried again. An error that is neither is a bug: it is logged with its
traceback, the call is tried a few times more, then settled as refused with the error's words, so that the gang's other
calls go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState, Gang
from muster.daemon.coordinator.core.state.fact_text import call_words
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.slurm.client.errors import SlurmRefused, SlurmUnavailable
from muster.slurm.client.states import JobState
from muster.slurm.client.types import Gone, Job, Slurm, Unknown

_log = logging.getLogger(__name__)
REQUEUE_DEADLINE_S = 30.0
"""A job with a dead node takes some 15 s to leave its nodes; only then is it in the queue again."""
BUG_TRIES = 3
"""How often a call is given in all that ends in an error nobody has thought of."""
_BUG_PAUSE_S = 0.25
_OURS = "muster: "
_PAUSE = wait_exponential(multiplier=0.25, max=5.0)


class SlurmCalls:
    """Owed calls under way. `post` gets a SlurmAnswered for each."""

    def __init__(self, slurm: Slurm, post: Callable[[events.Event], None]) -> None:
        self._slurm = slurm
        self._post = post
        self._taken: set[int] = set()
        self._queues: dict[str, deque[facts.SlurmOwed]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start_owed(self, state: DurableState) -> None:
        """Start every call that `state` owes and that is not yet under way."""
        for call in sorted(state.owed.values(), key=lambda call: call.call):
            if call.call not in self._taken:
                self._taken.add(call.call)
                self._enqueue(call, state)

    async def aclose(self) -> None:
        """Stop; what was not settled is owed still."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _enqueue(self, call: facts.SlurmOwed, state: DurableState) -> None:
        if call.gang in self._queues:
            self._queues[call.gang].append(call)
            return
        self._queues[call.gang] = deque([call])
        task = asyncio.create_task(self._work(call.gang, state))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, gang: str, state: DurableState) -> None:
        queue = self._queues[gang]
        try:
            while queue:
                call = queue.popleft()
                error = await self._carry_out(call, state)
                self._taken.discard(call.call)
                self._post(events.SlurmAnswered(gang, call.call, error))
        finally:
            del self._queues[gang]

    async def _carry_out(self, call: facts.SlurmOwed, state: DurableState) -> str | None:
        """Give the call until it is settled; the error's words, or None."""
        words = ""
        for _ in range(BUG_TRIES):
            if words:
                await asyncio.sleep(_BUG_PAUSE_S)
            try:
                await self._patiently(call, state)
            except SlurmRefused as refused:
                return str(refused)
            except Exception as error:  # noqa: BLE001  # the top of this task: a bug in one call must not stop the others
                words = f"a bug of Muster, not Slurm's word: {type(error).__name__}: {error}"
                _log.critical("%s: can't %s: %s", call.gang, call_words(call), words, exc_info=error)
            else:
                return None
        return words

    async def _patiently(self, call: facts.SlurmOwed, state: DurableState) -> None:
        trying = AsyncRetrying(
            retry=retry_if_exception_type(SlurmUnavailable),
            wait=_PAUSE,
            before_sleep=lambda attempt: _tell(call, attempt),
            reraise=True,
        )
        await trying(give, self._slurm, call, state)


async def give(slurm: Slurm, call: facts.SlurmOwed, state: DurableState) -> None:
    """Give `call` to `slurm`, once.

    Raises:
        SlurmError: it was refused, or not answered.
    """
    match call.verb:
        case "drain":
            await slurm.drain(call.node, call.text)
        case "down":
            await slurm.down(call.node, call.text)
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


async def _cancel(slurm: Slurm, call: facts.SlurmOwed, state: DurableState) -> None:
    gang = state.gangs.get(call.gang)
    if gang is None or call.job != gang.job:
        # An agent has told the number of a small job: its user may cancel no job of another through us.
        found = await _look_up(slurm, call.job)
        if isinstance(found, Gone):
            return
        if gang is None or found.user_id != gang.owner_uid:
            raise SlurmRefused(f"cancel job {call.job}", "it is no job of the gang's user")
    await slurm.cancel(call.job)


async def _requeue(slurm: Slurm, call: facts.SlurmOwed, state: DurableState) -> None:
    gang = state.gangs.get(call.gang)
    if gang is not None and gang.phase is Phase.REQUEUED:
        await _put_back(slurm, call, gang)
        await _explain(slurm, call)  # after it: a job that had ended takes no comment
    # Else it runs again already: it was done, and the answer was lost with an earlier coordinator.


async def _explain(slurm: Slurm, call: facts.SlurmOwed) -> None:
    """Say in the job's comment why it goes back; what its user wrote there stays in front."""
    job = await _look_up(slurm, call.job)
    if isinstance(job, Gone):
        return
    users = job.comment.partition(_OURS)[0].rstrip(" ;")
    try:
        await slurm.set_comment(call.job, f"{users}; {call.text}" if users else call.text)
    except SlurmRefused as refused:
        _log.warning("%s: %s", call.gang, refused)  # the requeue does not hang on that


async def _admit(slurm: Slurm, call: facts.SlurmOwed, state: DurableState) -> None:
    gang = state.gangs.get(call.gang)
    starts = gang is not None and gang.phase is Phase.GATHERING and not gang.members
    if gang is None or not (starts or gang.phase is Phase.REQUEUED):
        return  # it runs: what it was kept from no longer counts
    if _is_requeued_again(call, state):
        return  # it ran meanwhile; what goes back to the queue next says on which nodes it may start
    if starts or not await _waits(slurm, call.job):
        # Slurm has started it on its own, and no agent has come yet: should it go back, the nodes are still excluded.
        raise SlurmUnavailable(f"job {call.job} does not wait for nodes now")
    await _put_back(slurm, call, gang)


async def _put_back(slurm: Slurm, call: facts.SlurmOwed, gang: Gang) -> None:
    await slurm.requeue(call.job, call.exclude, call.admit, restarts=gang.restart_count, timeout_s=REQUEUE_DEADLINE_S)


def _is_requeued_again(call: facts.SlurmOwed, state: DurableState) -> bool:
    later = (owed for number, owed in state.owed.items() if number > call.call)
    return any(owed.gang == call.gang and owed.verb == "requeue" for owed in later)


async def _waits(slurm: Slurm, job: int) -> bool:
    found = await _look_up(slurm, job)
    return isinstance(found, Gone) or found.state.ended or found.state is JobState.PENDING


async def _look_up(slurm: Slurm, job: int) -> Job | Gone:
    answer = await slurm.jobs({job})
    found = answer if isinstance(answer, Unknown) else answer[job]
    if isinstance(found, Unknown):
        raise SlurmUnavailable(found.reason)
    return found


def _tell(call: facts.SlurmOwed, state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    _log.warning("%s: can't %s yet (try %d): %s", call.gang, call_words(call), state.attempt_number, error)
