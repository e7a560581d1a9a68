"""Polls Slurm for the jobs of active gangs, for the pool jobs of their members, and for the nodes that Muster knows.

Posts a JobSeen or NodeSeen event when the answer differs from the one before. Posts a NodeSeen as well when Slurm has a
node in service that Muster holds to be out of service: an operator may have resumed the node before its daemon was
heard again. An "Unknown" answer posts nothing: a Slurm that doesn't answer is no evidence.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import NoReturn, Protocol

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedState
from muster.daemon.coordinator.core.state.roster import Member
from muster.daemon.coordinator.core.state.state_tables import MONITORED
from muster.daemon.host.lasting_problem import LastingProblem
from muster.node_health import RESUMABLE
from muster.slurm.client.states import JobFlag, JobState, NodeState
from muster.slurm.client.types import Gone, Job, JobAnswers, Node, NodeAnswers, Unknown
from muster.wording import listed

JOB_POLL_INTERVAL_S, NODE_POLL_INTERVAL_S = 2.0, 5.0
TIME_LIMIT_TOLERANCE_S = 3.0
"""Seconds. A smaller change of a job's start or end is a difference of two clocks, not a change of the job."""
NO_OUTPUT_SIGNAL = 53
"""Slurm's signal of a job whose node could not open its output file. The job ends, and its batch script never runs."""
COMMAND_NOT_FOUND = 127
"""Exit status of a shell, and of the batch process, for a program that is not there."""
_log = logging.getLogger(__name__)

_BACK_IN_THE_QUEUE = frozenset({JobFlag.REQUEUED, JobFlag.REQUEUE_FED, JobFlag.REQUEUE_HOLD})
_OUT_OF_SERVICE = frozenset(
    {
        NodeState.DOWN, NodeState.DRAIN, NodeState.FAIL, NodeState.ERROR, NodeState.UNKNOWN, NodeState.FUTURE,
        NodeState.NOT_RESPONDING, NodeState.INVALID, NodeState.INVALID_REG, NodeState.MAINTENANCE,
        NodeState.POWER_DOWN, NodeState.POWER_DOWN_ASAP, NodeState.POWER_DOWN_FORCE, NodeState.POWER_DRAIN,
        NodeState.POWERED_DOWN, NodeState.POWERING_DOWN, NodeState.POWERING_UP,
        NodeState.REBOOT_ISSUED, NodeState.REBOOT_REQUESTED,
    }
)  # fmt: skip

_BOOTS = frozenset(
    {
        NodeState.POWER_UP, NodeState.POWERING_UP, NodeState.POWERED_DOWN, NodeState.POWERING_DOWN,
        NodeState.REBOOT_ISSUED,
    }
)  # fmt: skip
"""A node of a job that Slurm configures has one of them until it has booted. Not REBOOT_REQUESTED: with `scontrol
reboot` a node has it while jobs run."""
_IT_BOOTS = "it boots"
_HAVE_BOOTED = "its nodes have booted, and Slurm configures them"
_PROLOG = "Prolog"
"""Slurm's reason of a job that has its nodes and runs nothing yet: their Prolog runs (PrologFlags=Alloc)."""


class SlurmQueries(Protocol):
    """The part of the Slurm client (slurm/client/types.py) that the watch uses."""

    async def jobs(
        self, ids: Collection[int] | None = None, *, in_doubt: Collection[int] = ()
    ) -> JobAnswers | Unknown: ...
    async def nodes(self, names: Collection[str] | None = None) -> NodeAnswers | Unknown: ...


class SlurmWatch:
    """Polls `slurm` for the jobs and nodes in `state`, and posts changes.

    `ahead_s` returns the seconds by which the core's clock is ahead of the wall clock, which Slurm uses. `note_account`
    is told, at each poll, the account that Slurm charges for the job of a gang. `in_doubt` returns the jobs of which
    every flag is needed: `jobs_in_doubt`.
    """

    def __init__(
        self,
        slurm: SlurmQueries,
        state: DurableState,
        post: Callable[[events.Event], None],
        ahead_s: Callable[[], float] = lambda: 0.0,
        note_account: Callable[[str, str], None] = lambda gang, account: None,
        in_doubt: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._slurm = slurm
        self._state = state
        self._post = post
        self._ahead_s = ahead_s
        self._note_account = note_account
        self._in_doubt = in_doubt
        self._jobs_unknown = LastingProblem(_log, "Slurm answers for its jobs again")
        self._nodes_unknown = LastingProblem(_log, "Slurm answers for its nodes again")
        self._jobs: dict[str, events.SlurmJobChanged] = {}
        self._pool_jobs: dict[tuple[str, int], events.PoolJobChanged] = {}
        self._nodes: dict[str, events.SlurmNodeChanged] = {}

    async def run(self) -> None:
        """Poll until cancelled."""
        await asyncio.gather(
            _repeat(self.poll_jobs, JOB_POLL_INTERVAL_S), _repeat(self.poll_nodes, NODE_POLL_INTERVAL_S)
        )

    async def poll_jobs(self) -> None:
        """Poll the jobs once. Where a job has lost nodes, poll the nodes first: a node that Slurm has DOWN is lost in
        another way than a node that was given back, and a launch that failed has drained its node."""
        gangs = [gang for gang in self._state.gangs.values() if not (gang.final and gang.slurm.job_over)]
        self._jobs = {gang.id: seen for gang in gangs if (seen := self._jobs.get(gang.id))}
        if not gangs:
            return
        pool_jobs = {(gang.id, member.job) for gang in gangs for member in _pool_members(gang)}
        self._pool_jobs = {key: seen for key, seen in self._pool_jobs.items() if key in pool_jobs}
        asked = {*(gang.slurm.job for gang in gangs), *(job for _, job in pool_jobs)}
        found = await self._slurm.jobs(asked, in_doubt=self._in_doubt())
        if isinstance(found, Unknown):
            self._jobs_unknown.meet(f"can't get the jobs from Slurm: {found.reason}")
            return
        self._jobs_unknown.end()
        booting = await self._booting(found)
        seen_jobs = [
            (gang, job_seen(gang, job, self._ahead_s(), self._boot_words(gang, job, booting)))
            for gang in gangs
            if (job := found.get(gang.slurm.job)) is not None
        ]
        seen_pool_jobs = {key: _pool_job_seen(*key, found[key[1]]) for key in sorted(pool_jobs) if key[1] in found}
        lost = any(self._lost_nodes(seen) for _, seen in seen_jobs) or not _none_lost(self._pool_jobs, seen_pool_jobs)
        if lost and not await self.poll_nodes():
            return  # the next poll looks at both again
        for gang, seen in seen_jobs:
            job = found[gang.slurm.job]
            if isinstance(job, Job) and job.account and job.user_id == gang.account.owner_uid:
                self._note_account(gang.id, job.account)
            self._post_if_changed(gang, seen)
        for key, seen_pool_job in seen_pool_jobs.items():
            if self._pool_jobs.get(key) != seen_pool_job:
                self._pool_jobs[key] = seen_pool_job
                self._post(seen_pool_job)

    async def _booting(self, found: JobAnswers) -> frozenset[str]:
        """The nodes that Slurm powers up, or boots, for these jobs."""
        names = {name for job in found.values() if isinstance(job, Job) and _is_configuring(job) for name in job.nodes}
        nodes = await self._slurm.nodes(names) if names else {}
        if isinstance(nodes, Unknown):
            return frozenset()
        return frozenset(name for name, node in nodes.items() if isinstance(node, Node) and node.states & _BOOTS)

    def _boot_words(self, gang: Gang, found: Job | Gone, booting: frozenset[str]) -> str:
        """That Slurm boots nodes of the job, and which, or runs their Prolog; empty: it does neither."""
        if isinstance(found, Gone) or found.state is not JobState.RUNNING:
            return ""
        if found.reason == _PROLOG and gang.phase not in MONITORED:
            return f"the Prolog of its nodes runs: if that lasts, slurmd's log on {listed(found.nodes)} says why"
        if not _is_configuring(found):
            return ""
        if names := sorted(booting.intersection(found.nodes)):
            return f"{_IT_BOOTS} {listed(names)}"
        before = self._jobs.get(gang.id)
        if before is None or before.restart_count != found.restart_count:
            return ""
        return _HAVE_BOOTED if before.pending_reason.startswith((_IT_BOOTS, _HAVE_BOOTED)) else ""

    def _lost_nodes(self, seen: events.SlurmJobChanged) -> bool:
        """The job runs on, without some of the nodes of Slurm's last answer, or is in the queue again."""
        before = self._jobs.get(seen.gang)
        return before is not None and not seen.ended and not set(before.nodes) <= set(seen.nodes)

    async def poll_nodes(self) -> bool:
        """Poll the nodes once. Returns whether Slurm has answered."""
        names = self._node_names() - self._nodes_with_owed_calls()
        if not names:
            return True
        found = await self._slurm.nodes(names)
        if isinstance(found, Unknown):
            self._nodes_unknown.meet(f"can't get the nodes from Slurm: {found.reason}")
            return False
        self._nodes_unknown.end()
        # A node that is being drained is left out: the answer may be older than the drain.
        for name in sorted(names - self._nodes_with_owed_calls()):
            seen = node_seen(name, found.get(name, Gone()))
            if self._nodes.get(name) != seen or self._is_resumed(seen):
                self._nodes[name] = seen
                self._post(seen)
        return True

    def _is_resumed(self, seen: events.SlurmNodeChanged) -> bool:
        known = self._state.nodes.get(seen.node)
        return seen.in_service and known is not None and (known.health in RESUMABLE or known.drain is not None)

    def _post_if_changed(self, gang: Gang, seen: events.SlurmJobChanged) -> None:
        if not _unchanged(self._jobs.get(gang.id), seen):
            self._jobs[gang.id] = seen
            self._post(seen)

    def _node_names(self) -> set[str]:
        members = {name for gang in self._state.gangs.values() if not gang.final for name in gang.roster.members}
        return members | set(self._state.nodes)

    def _nodes_with_owed_calls(self) -> set[str]:
        return {call.node for call in self._state.owed.values() if call.verb in ("drain", "down", "resume")}


def jobs_in_doubt(state: DurableState, observed: ObservedState) -> set[int]:
    """Jobs whose user may have stopped them: agents of theirs are silent, or they are known to stand still."""
    seen = ((gang, observed.gangs.get(gang.id)) for gang in state.gangs.values() if not gang.final)
    return {job for gang, one in seen if one and (one.suspected_since or one.suspended_jobs) for job in gang.jobs()}


def _pool_members(gang: Gang) -> list[Member]:
    """Members that came with a pool job of their own, and whose processes may still run."""
    return [member for member in gang.roster.members.values() if member.job != gang.slurm.job and not member.gone]


def _pool_job_seen(gang: str, job: int, found: Job | Gone) -> events.PoolJobChanged:
    if isinstance(found, Gone):
        return events.PoolJobChanged(gang, job, ())
    return events.PoolJobChanged(gang, job, found.held_nodes, suspended=_is_suspended(found))


def _none_lost(
    before: Mapping[tuple[str, int], events.PoolJobChanged], now: Mapping[tuple[str, int], events.PoolJobChanged]
) -> bool:
    """No pool job has lost a node."""
    return all(set(seen.nodes) <= set(now.get(key, seen).nodes) for key, seen in before.items())


def _unchanged(before: events.SlurmJobChanged | None, seen: events.SlurmJobChanged) -> bool:
    """Whether nothing has changed. Start and end may differ by less than the tolerance."""
    if before is None:
        return False
    same_times = _is_close(before.limit_at, seen.limit_at) and _is_close(before.start_at, seen.start_at)
    return same_times and replace(before, limit_at=seen.limit_at, start_at=seen.start_at) == seen


def _is_close(before: float | None, now: float | None) -> bool:
    return before == now or (before is not None and now is not None and abs(before - now) < TIME_LIMIT_TOLERANCE_S)


def job_seen(gang: Gang, found: Job | Gone, ahead_s: float = 0.0, boot_words: str = "") -> events.SlurmJobChanged:
    """Slurm's view of the gang's job. Times are on a clock that is `ahead_s` seconds ahead of Slurm's clock. A job that
    Slurm no longer knows has ended as "GONE".

    A job with nodes that boot waits: Slurm starts its batch script once they have booted. The time in which its agents
    must attach counts from then. `boot_words`: that nodes boot; empty: none does.
    """
    if isinstance(found, Gone):
        return events.SlurmJobChanged(gang.id, gang.slurm.job, (), gang.slurm.restart_count, "GONE")
    ended = found.state.value if found.state.ended and not found.flags & _BACK_IN_THE_QUEUE else None
    limit_s = float(found.time_limit_s or 0)
    end = found.end_time if found.state is JobState.RUNNING and limit_s else None
    if end is not None and found.start_time is not None:
        end = max(end, found.start_time + limit_s)  # an earlier end is that of the grace time of a preemption
    limit_at = None if end is None else end + ahead_s
    # Slurm raises the restart count of a requeued job at once, and lists the nodes of the last run until that run has
    # ended.
    nodes = () if boot_words else found.held_nodes
    return events.SlurmJobChanged(
        gang.id,
        gang.slurm.job,
        nodes,
        found.restart_count,
        ended,
        limit_at,
        limit_s,
        pending_reason=boot_words or (found.reason if found.state is JobState.PENDING else ""),
        partition=found.partition,
        suspended=_is_suspended(found),
        end_words=_end_words(gang, found) if ended else "",
        batch_host=found.batch_host if nodes else "",
        completing=found.nodes if found.state is JobState.PENDING and JobFlag.COMPLETING in found.flags else (),
        start_at=None if ended or found.start_time is None else found.start_time + ahead_s,
    )


def _is_configuring(found: Job) -> bool:
    return found.state is JobState.RUNNING and JobFlag.CONFIGURING in found.flags


def _is_suspended(found: Job) -> bool:
    """Slurm has stopped all processes of the job; or its user has, with scancel --signal=STOP."""
    return found.state is JobState.SUSPENDED or JobFlag.STOPPED in found.flags


def _end_words(gang: Gang, found: Job) -> str:
    """Why a job has ended of which no agent attached, or where its batch script says it; empty: not known."""
    if found.state is JobState.CANCELLED and not found.nodes and not found.restart_count:
        return "it had not started"
    run_dir = json.loads(gang.account.shown_spec).get("run_dir", "")
    if gang.spec.awaits_launch:
        return _end_of_script(found)
    if found.exit_code == COMMAND_NOT_FOUND:
        host = found.batch_host or "its first node"
        return f"{host} has no muster-agent, or no srun, in the PATH of the shell that submitted it"
    if found.exit_signal != NO_OUTPUT_SIGNAL:
        return f"{run_dir}/slurm-{found.id}.out says why" if found.state is JobState.FAILED and run_dir else ""
    return (
        f"{found.batch_host or 'its first node'} could not open the job's output file: run_dir = {run_dir!r} must be a "
        "folder that all nodes share"
    )


def _end_of_script(found: Job) -> str:
    """How a user's own script has ended of which no agent attached."""
    if found.exit_signal == NO_OUTPUT_SIGNAL:
        return f"{found.batch_host or 'its first node'} could not open the job's output file"
    if found.state is JobState.CANCELLED and not found.exit_signal and not found.exit_code:
        return ""  # its script has not begun
    how = f"by signal {found.exit_signal}" if found.exit_signal else f"with exit code {found.exit_code or 0}"
    return f"its script has ended {how}, before a launch that is supervised"


def node_seen(name: str, found: Node | Gone) -> events.SlurmNodeChanged:
    """Slurm's view of a node, with its states and its reason in words."""
    if isinstance(found, Gone):
        return events.SlurmNodeChanged(name, False, "Slurm has no such node", down=True)
    words = "+".join(sorted(state.value for state in found.states))
    reason = f": {found.reason}" if found.reason else ""
    in_service = not found.states & _OUT_OF_SERVICE
    text = f"{'in' if in_service else 'out of'} service in Slurm ({words}{reason})"
    fails = NodeState.FAIL in found.states
    drain = events.SlurmDrain(found.reason, _is_idle(found), fails) if found.drained else None
    return events.SlurmNodeChanged(name, in_service, text, NodeState.DOWN in found.states, drain)


def _is_idle(found: Node) -> bool:
    """Nothing of a job is left on the node."""
    return bool(found.states & {NodeState.IDLE, NodeState.DOWN}) and NodeState.COMPLETING not in found.states


async def _repeat(poll: Callable[[], Awaitable[object]], every_s: float) -> NoReturn:
    while True:
        await poll()
        await asyncio.sleep(every_s)
