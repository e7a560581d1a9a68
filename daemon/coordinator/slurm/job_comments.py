"""One line of Muster in Slurm's comment of a job, and one in its AdminComment.

The comment is for the job's user: the phase, the step and the recoveries. A comment that somebody else has written
stays. The AdminComment is for administrators: which nodes the job has lost, and why. Other text in it stays.

Both follow from the durable state at the time of the call, so none is owed: an older line is never written after a
newer one, and a coordinator that starts writes what is missing. The calls are made beside all others, one at a time: no
recovery waits for them. Slurm shows these lines to everybody who sees the job, so they have no word that a script has
printed.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.generations import Recovery
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.host import clock
from muster.daemon.host.lasting_problem import LastingProblem
from muster.node_health import OUT_OF_SERVICE
from muster.slurm.client.errors import SlurmRefused, SlurmUnavailable
from muster.slurm.client.types import Job, Slurm, Unknown
from muster.wording import counted, listed

INTERVAL_S = 30.0
"""Seconds between two changes of one job's lines, and until a call is tried again. An end and a requeue do not wait."""
PAUSE_S = 0.5
"""Seconds between two calls: many jobs may recover at once."""
MOST_CHANGES = 20
"""After one look at Slurm: what somebody else writes meanwhile is not seen."""
MOST_CHARS = 300
MOST_ADMIN_CHARS = 1000
"""Of the whole AdminComment: Slurm takes 1024."""
PREFIX = "muster: "
_FIRST = 0.0
"""Due before all others."""
_OWN_PART = re.compile(r"\[muster: [^\]]*\]")
_log = logging.getLogger(__name__)


class JobComments:
    """Writes the lines of the jobs in `state`. `comment`, `admin_comment`: whether the site wants them."""

    def __init__(
        self,
        slurm: Slurm,
        state: DurableState,
        *,
        comment: bool = True,
        admin_comment: bool = True,
        now: Callable[[], float] = clock.monotonic,
    ) -> None:
        self._slurm, self._state, self._now = slurm, state, now
        self._comment, self._admin_comment = comment, admin_comment
        self._due = {id: now() for id, gang in state.gangs.items() if not gang.final}
        self._not_before: dict[str, float] = {}
        self._woken = asyncio.Event()
        self._silent = LastingProblem(_log, "the comments of jobs are written again")

    def note(self, decided: Sequence[facts.Fact]) -> None:
        """Note of which jobs the lines may have changed. Never waits."""
        for fact in decided:
            match fact:
                case facts.GangEnded():
                    self._write_now(fact.gang)
                case facts.SlurmCallSettled() if self._is_requeued(fact.gang):
                    self._write_now(fact.gang)  # not before: Slurm takes no comment for a job that has ended
                case facts.PhaseChanged(phase=Phase.RUNNING):
                    self._due.setdefault(fact.gang, max(self._now(), self._not_before.get(fact.gang, 0.0)))
                case facts.GangForgotten():
                    self._due.pop(fact.gang, None)
                    self._not_before.pop(fact.gang, None)

    def _write_now(self, gang: str) -> None:
        self._due[gang] = _FIRST
        self._woken.set()

    def _is_requeued(self, gang: str) -> bool:
        return (found := self._state.gangs.get(gang)) is not None and found.phase is Phase.REQUEUED

    async def run(self) -> None:
        """Write what is due, until cancelled."""
        while self._comment or self._admin_comment:
            self._woken.clear()
            await self.write_due(PAUSE_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S):
                    await self._woken.wait()

    async def write_due(self, pause_s: float = 0.0) -> None:
        """Write lines that are due: some of many. `pause_s`: seconds between two changes."""
        now = self._now()
        waiting = {id: self._due.pop(id) for id, at in list(self._due.items()) if at <= now}
        due = [gang for id in sorted(waiting, key=waiting.__getitem__) if (gang := self._state.gangs.get(id))]
        if not due:
            return
        found = await self._slurm.jobs({gang.slurm.job for gang in due})
        changes = 0
        while due and changes < MOST_CHANGES and not (changes and self._woken.is_set()):
            gang = due.pop(0)
            self._not_before[gang.id] = now + INTERVAL_S
            try:
                if isinstance(found, Unknown):
                    raise SlurmUnavailable(found.reason)
                job = found.get(gang.slurm.job)
                if isinstance(job, Job) and await self._write(gang, job):
                    changes += 1
                    await asyncio.sleep(pause_s)
            except SlurmUnavailable as error:
                self._silent.meet(f"the comments of jobs are not written: {error}")
                self._due.setdefault(gang.id, now + INTERVAL_S)
            except SlurmRefused as refused:
                _log.info("%s: %s", gang.id, refused)
            else:
                self._silent.end()
        for gang in due:  # these wait for the next look, or let an end go first
            self._due.setdefault(gang.id, waiting[gang.id])

    async def _write(self, gang: Gang, job: Job) -> bool:
        """Write the lines of `gang` that differ from those of `job`. Returns whether there were any."""
        comment = comment_line(gang, self._state) if self._comment and is_own(job.comment) else ""
        admin = with_own_part(job.admin_comment, admin_line(gang, self._state)) if self._admin_comment else ""
        new_comment = comment if comment != job.comment else ""
        new_admin = admin if admin != job.admin_comment else ""
        if job.state.ended or not (new_comment or new_admin):
            return False
        await self._slurm.set_comments(job.id, new_comment, new_admin)
        return True


def is_own(comment: str) -> bool:
    """Whether Muster may replace the comment of a job: nobody else has written it."""
    return not comment or comment.startswith(PREFIX)


def comment_line(gang: Gang, state: DurableState) -> str:
    """What the user sees of the job in squeue and sacct; empty while it changes."""
    step = gang.newest.progress.step
    number = step.step if step else 0
    match gang.phase:
        case Phase.RUNNING:
            words = f"RUNNING{f' from step {number}' if number else ''}{_recoveries(gang, state)}"
        case Phase.REQUEUED:
            words = f"REQUEUED at step {number}{_recoveries(gang, state)}: {gang.reason}"
        case phase if gang.final:
            code = f" with exit code {gang.exit_code}" if gang.exit_code else ""
            words = f"{phase.value}{code} at step {number}{_recoveries(gang, state)}"
        case _:
            return ""
    return f"{PREFIX}{words}"[:MOST_CHARS]


def _recoveries(gang: Gang, state: DurableState) -> str:
    count, last = len(gang.recovery.recoveries), gang.recovery.last
    if last is None:
        return ""
    nodes = f" of {listed(lost)}" if (lost := _lost_in(last, gang, state)) else ""
    action = f", the last: {last.action}{nodes}" if last.action else ""
    return f", {counted(count, 'recovery', 'recoveries')}{action}"


def admin_line(gang: Gang, state: DurableState) -> str:
    """Which nodes the job has lost, the newest first, and why; empty: none."""
    lost = "; ".join(_lost_nodes(gang, state))
    return f"[{PREFIX}{lost.translate(str.maketrans('[]', '()'))}]" if lost else ""


def _lost_nodes(gang: Gang, state: DurableState) -> Iterator[str]:
    for recovery in reversed(gang.recovery.recoveries):
        for name in _lost_in(recovery, gang, state):
            node = state.nodes.get(name)
            bad = node is not None and node.health in OUT_OF_SERVICE
            why = f"{node.health}: {node.reason}" if node and bad else "in service" if node else "not known"
            yield f"{name} left in generation {recovery.generation} ({recovery.action or 'recovering'}), {why}"


def _lost_in(recovery: Recovery, gang: Gang, state: DurableState) -> list[str]:
    """The nodes that the job has lost in a recovery. Slurm preempts or requeues a job with all its nodes, which their
    agents leave one after the other: of these, the job has lost none but those against which Muster holds something."""
    if recovery.action not in ("", "requeue"):  # empty: the next generation has not started yet
        return recovery.nodes_out
    bad = {name for name, node in state.nodes.items() if node.health in OUT_OF_SERVICE}
    return [name for name in recovery.nodes_out if name in gang.slurm.exclusions or name in bad]


def with_own_part(others: str, own: str) -> str:
    """An AdminComment with `own` in the place of Muster's part, or behind it all; empty: nothing is to be written."""
    if not own:
        return ""
    kept = _OWN_PART.sub("", others).strip()
    room = MOST_ADMIN_CHARS - len(kept) - 1
    if len(own) > room:
        own = f"{own[: room - 5]} ...]"
    return f"{kept} {own}".strip() if room > len(PREFIX) + 20 else ""
