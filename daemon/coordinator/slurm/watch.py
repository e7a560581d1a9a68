"""Keeps an eye on Slurm: the jobs of gangs that go on, and the nodes that Muster knows.

Posts a JobSeen or NodeSeen when something changed since the answer before, and a NodeSeen as well when a node that is
in service is held to be out of it: it may have been resumed before its daemon was heard again. "Unknown" posts nothing:
from a Slurm that doesn't answer nothing follows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import NoReturn, Protocol

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.durable_state import DurableState, Gang
from muster.daemon.coordinator.core.state.state_tables import RESUMABLE
from muster.slurm.client.states import JobFlag, JobState, NodeState
from muster.slurm.client.types import Gone, Job, JobAnswers, Node, NodeAnswers, Unknown

JOBS_EVERY_S, NODES_EVERY_S = 2.0, 5.0
SAME_LIMIT_S = 3.0
"""Two clocks that both are right come apart by less, from one look to the next: no news."""
_log = logging.getLogger(__name__)

_BACK_IN_THE_QUEUE = frozenset({JobFlag.REQUEUED, JobFlag.REQUEUE_FED, JobFlag.REQUEUE_HOLD})
_HOLDS_NODES = frozenset({JobState.RUNNING, JobState.SUSPENDED})
_OUT_OF_SERVICE = frozenset(
    {
        NodeState.DOWN, NodeState.DRAIN, NodeState.FAIL, NodeState.ERROR, NodeState.UNKNOWN, NodeState.FUTURE,
        NodeState.NOT_RESPONDING, NodeState.INVALID, NodeState.INVALID_REG, NodeState.MAINTENANCE,
        NodeState.POWER_DOWN, NodeState.POWER_DOWN_ASAP, NodeState.POWER_DOWN_FORCE, NodeState.POWER_DRAIN,
        NodeState.POWERED_DOWN, NodeState.POWERING_DOWN, NodeState.POWERING_UP,
        NodeState.REBOOT_ISSUED, NodeState.REBOOT_REQUESTED,
    }
)  # fmt: skip


class Questions(Protocol):
    """Of Slurm (slurm/client/types.py), what is asked here."""

    async def jobs(self, ids: Collection[int] | None = None) -> JobAnswers | Unknown: ...
    async def nodes(self, names: Collection[str] | None = None) -> NodeAnswers | Unknown: ...


class SlurmWatch:
    """Polls `slurm` for what `state` names, and posts what changed. `ahead_s`: seconds by which the core's clock is
    ahead of the wall clock, which is Slurm's."""

    def __init__(
        self,
        slurm: Questions,
        state: DurableState,
        post: Callable[[events.Event], None],
        ahead_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._slurm = slurm
        self._state = state
        self._post = post
        self._ahead_s = ahead_s
        self._jobs: dict[str, events.JobSeen] = {}
        self._nodes: dict[str, events.NodeSeen] = {}

    async def run(self) -> None:
        """Poll until cancelled."""
        await asyncio.gather(_for_ever(self.look_at_jobs, JOBS_EVERY_S), _for_ever(self.look_at_nodes, NODES_EVERY_S))

    async def look_at_jobs(self) -> None:
        """Ask for the jobs once."""
        gangs = [gang for gang in self._state.gangs.values() if not (gang.final and gang.job_over)]
        self._jobs = {gang.id: seen for gang in gangs if (seen := self._jobs.get(gang.id))}
        if not gangs:
            return
        found = await self._slurm.jobs({gang.job for gang in gangs})
        if isinstance(found, Unknown):
            _log.warning("Slurm doesn't tell about jobs: %s", found.reason)
            return
        for gang in gangs:
            if gang.job in found:
                self._tell_job(gang, job_seen(gang, found[gang.job], self._ahead_s()))

    async def look_at_nodes(self) -> None:
        """Ask for the nodes once."""
        before = self._busy()
        names = self._names() - before
        if not names:
            return
        found = await self._slurm.nodes(names)
        if isinstance(found, Unknown):
            _log.warning("Slurm doesn't tell about nodes: %s", found.reason)
            return
        # What is being drained just now may have been asked for before and be answered after.
        for name in sorted(names - self._busy()):
            seen = node_seen(name, found.get(name, Gone()))
            if self._nodes.get(name) != seen or self._reinstates(seen):
                self._nodes[name] = seen
                self._post(seen)

    def _reinstates(self, seen: events.NodeSeen) -> bool:
        known = self._state.nodes.get(seen.node)
        return seen.in_service and known is not None and known.verdict in RESUMABLE

    def _tell_job(self, gang: Gang, seen: events.JobSeen) -> None:
        if not _same(self._jobs.get(gang.id), seen):
            self._jobs[gang.id] = seen
            self._post(seen)

    def _names(self) -> set[str]:
        members = {name for gang in self._state.gangs.values() if not gang.final for name in gang.members}
        return members | set(self._state.nodes)

    def _busy(self) -> set[str]:
        return {call.node for call in self._state.owed.values() if call.verb in ("drain", "down")}


def _same(before: events.JobSeen | None, seen: events.JobSeen) -> bool:
    """Nothing has changed; the end of the time limit may have been carried over a little differently."""
    if before is None or before.limit_at is None or seen.limit_at is None:
        return before == seen
    return abs(before.limit_at - seen.limit_at) < SAME_LIMIT_S and replace(before, limit_at=seen.limit_at) == seen


def job_seen(gang: Gang, found: Job | Gone, ahead_s: float = 0.0) -> events.JobSeen:
    """Slurm's view of the gang's job, by a clock that is `ahead_s` seconds ahead of Slurm's. A job that Slurm has
    forgotten ended "GONE"."""
    if isinstance(found, Gone):
        return events.JobSeen(gang.id, gang.job, (), gang.restart_count, "GONE")
    ended = found.state.value if found.state.ended and not found.flags & _BACK_IN_THE_QUEUE else None
    end = found.end_time if found.state is JobState.RUNNING and found.time_limit_s else None
    limit_at = None if end is None else end + ahead_s
    limit_s = float(found.time_limit_s or 0)
    # A requeued job counts as restarted at once, and shows the nodes of its last run until that is over.
    nodes = found.nodes if found.state in _HOLDS_NODES else ()
    waits = found.reason if found.state is JobState.PENDING else ""
    return events.JobSeen(gang.id, gang.job, nodes, found.restart_count, ended, limit_at, limit_s, waits)


def node_seen(name: str, found: Node | Gone) -> events.NodeSeen:
    """Slurm's view of a node, with its states and reason in words."""
    if isinstance(found, Gone):
        return events.NodeSeen(name, False, "Slurm has no such node", down=True)
    words = "+".join(sorted(state.value for state in found.states))
    reason = f": {found.reason}" if found.reason else ""
    in_service = not found.states & _OUT_OF_SERVICE
    text = f"{'in' if in_service else 'out of'} service in Slurm ({words}{reason})"
    return events.NodeSeen(name, in_service, text, NodeState.DOWN in found.states)


async def _for_ever(look: Callable[[], Awaitable[None]], every_s: float) -> NoReturn:
    while True:
        await look()
        await asyncio.sleep(every_s)
