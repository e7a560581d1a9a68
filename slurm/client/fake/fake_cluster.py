"""An in-memory Slurm cluster. It implements only the rules that recovery depends on, as measured on Slurm 26.05.

The cluster has no thread, socket or clock: `now` is an input. The owner reports what happens to nodes (`fail_node`,
`recover_node`) and to batch scripts (`end_batch_script`). A job gets whole nodes, in the order of submission.

The rules (tests/cluster/test_slurm_rules.py checks them on a real Slurm):
- A failed node is NOT_RESPONDING after 16 s and DOWN after 29 s. Its jobs lose the node only when it is DOWN.
- A --no-kill job with several nodes continues without a node that goes DOWN. Any other job is requeued or fails.
- Slurm never changes the batch host of a running job. A job without its batch host cannot shrink, and nobody reports
  its end.
- The end of the batch script ends the job, even if the batch host was set DOWN and the job continues on other nodes.
- If a batch script died with its host, Slurm notices this when the host's slurmd registers again. Slurm does not notice
  it within 20 s of the job's start (BatchStartTimeout and MessageTimeout). After that, Slurm checks again only after
  half an hour.
- DRAIN remains set when slurmd registers again. DOWN alone does not (ReturnToService=2).
- A requeued job waits 121 s, unless its start time is changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from muster.slurm.client.errors import BatchHostRefused, SlurmRefused
from muster.slurm.client.fake.start_estimate import estimate
from muster.slurm.client.parsing import error_messages
from muster.slurm.client.parsing.sbatch_request import JobRequest
from muster.slurm.client.states import JobState, NodeState
from muster.slurm.client.types import Job, NeverStarts, Node, StartEstimate, updated_exclusions

NOT_RESPONDING_AFTER: Final = 16.0
"""Seconds from a node's failure until Slurm sets NOT_RESPONDING."""
DOWN_AFTER: Final = 29.0
"""Seconds from a node's failure until Slurm sets DOWN."""
REQUEUE_DELAY: Final = 121.0
"""Seconds until Slurm starts a requeued job."""
_NO_LIMIT_S: Final = 365 * 86400.0
"""Seconds that a job without a time limit counts as running."""
BATCH_START_GRACE_S: Final = 20.0
"""Seconds after a job's start in which Slurm does not miss the batch script."""


@dataclass(slots=True)
class _JobEntry:
    """A job, and what Slurm stores about the job but does not show."""

    job: Job
    request: JobRequest
    begin: float = 0.0
    """Unix seconds before which the job does not start."""
    script_lives: bool = False
    """Whether the batch script runs. Its end ends the job."""


@dataclass(slots=True)
class _NodeEntry:
    """A node: what Slurm shows, and the time since which slurmd does not answer (None: slurmd answers)."""

    node: Node
    lost_at: float | None = None

    @property
    def schedulable(self) -> bool:
        """Whether Slurm would start a job on this node. A dead node remains schedulable until Slurm notices the
        failure.
        """
        return not (self.node.drained or self.node.down or self.node.not_responding)


class FakeCluster:
    """The state of one cluster and the rules by which the state changes. All times are Unix seconds from `now`."""

    def __init__(
        self,
        nodes: Iterable[str],
        *,
        now: Callable[[], float],
        leaves: Mapping[str, str] | None = None,
        user: tuple[int, str] = (1000, "user"),
        on_change: Callable[[Job], None] | None = None,
    ) -> None:
        self._now = now
        self._user = user
        self._on_change = on_change
        self.leaves: Mapping[str, str] = leaves or {}
        """The leaf switch of each node that has one."""
        self._hosts = {
            name: _NodeEntry(Node(name, frozenset({NodeState.IDLE}), address=name, boot_time=now())) for name in nodes
        }
        self._entries: dict[int, _JobEntry] = {}
        self.partitions: dict[str, tuple[str, ...]] = {}
        """The nodes of each partition. They restrict no job."""
        self.prolog_fails_on: set[str] = set()
        """Nodes on which no job can be launched."""

    # What Slurm shows

    def nodes(self) -> dict[str, Node]:
        """All nodes as Slurm shows them now."""
        self.apply_due_changes()
        busy = {name for entry in self._running() for name in entry.job.nodes}
        return {name: _with_base(host.node, name in busy) for name, host in self._hosts.items()}

    def jobs(self) -> dict[int, Job]:
        """All jobs, including those that have ended."""
        self.apply_due_changes()
        return {id: entry.job for id, entry in self._entries.items()}

    # What happens to the hardware and the scripts

    def fail_node(self, node: str, *, powered_off: bool = True) -> None:
        """The node's slurmd stops answering. Slurm notices this later.

        Args:
            powered_off: the node's processes end as well. False: a network partition, the processes continue.
        """
        self._host("lose a node", node).lost_at = self._now()
        for entry in self._batch_on(node) if powered_off else ():
            entry.script_lives = False

    def recover_node(self, node: str) -> None:
        """The node's slurmd registers again. The node is back in service unless DRAIN is set.

        Slurm kills the batch script of a job that has lost the node, and the job continues. Slurm requeues or fails a
        job that still has the node but no batch script, except in the first `BATCH_START_GRACE_S` seconds of the job.
        """
        host = self._host("recover a node", node)
        self.apply_due_changes()
        host.lost_at = None
        host.node = replace(host.node, states=host.node.states - {NodeState.NOT_RESPONDING, NodeState.DOWN})
        for entry in self._batch_on(node):
            if node not in entry.job.nodes:
                entry.script_lives = False
            elif not entry.script_lives and self._now() - (entry.job.start_time or 0.0) > BATCH_START_GRACE_S:
                self._fail(entry)
        self.apply_due_changes()

    def end_batch_script(self, job: int, exit_code: int = 0) -> bool:
        """The batch script of `job` returns `exit_code`, and the job ends.

        Returns False and changes nothing if the script is dead or its host is cut off. The job ends even if its batch
        host was set DOWN and removed from the job.
        """
        entry = self._entry("finish", job)
        self.apply_due_changes()
        if not entry.job.running or not entry.script_lives:
            return False
        if self._hosts[entry.job.batch_host].lost_at is not None:
            return False
        self.complete(job, exit_code)
        return True

    def add_running_node(self, job: int, node: str, uid: int) -> None:
        """Adds `node` to the cluster and to the running `job` of user `uid`.

        A cluster without a queue (`muster run --local`) gets its nodes this way. A known node and a job that has ended
        do not change.
        """
        if node in self._hosts:
            return
        known = Node(node, frozenset({NodeState.IDLE}), address="127.0.0.1", boot_time=self._now())
        self._hosts[node] = _NodeEntry(known)
        entry = self._entries.get(job)
        if entry is None:
            running = Job(
                job, JobState.RUNNING, name="local", user_id=uid, nodes=(node,), batch_host=node, start_time=self._now()
            )
            self._entries[job] = _JobEntry(running, JobRequest(name="local", no_kill=True, requeue=False))
            self._changed(self._entries[job], running)
        elif entry.job.state is JobState.RUNNING:
            self._changed(entry, replace(entry.job, nodes=(*entry.job.nodes, node)))

    # Commands to Slurm. They raise SlurmRefused with Slurm's own error messages.

    def submit(self, request: JobRequest, user: tuple[int, str] | None = None) -> int:
        """Queues a job of `user` (uid and name; None: the cluster's user). Returns the job id.

        The job starts as soon as enough nodes are free.
        """
        if request.nodes > len(self._hosts):
            raise SlurmRefused("submit a job", "Requested node configuration is not available")
        id = len(self._entries) + 1
        job = Job(
            id,
            JobState.PENDING,
            name=request.name,
            user_id=(user or self._user)[0],
            user_name=(user or self._user)[1],
            excluded=request.exclude,
            time_limit_s=request.time_limit_s,
            comment=request.comment,
            requeue=request.requeue,
            dependency=request.dependency,
            work_dir=request.work_dir,
        )
        self._entries[id] = _JobEntry(job, request, begin=self._now() + request.begin_delay_s)
        self._changed(self._entries[id], job)
        self.apply_due_changes()
        return id

    def estimate_start(self, request: JobRequest) -> StartEstimate | NeverStarts:
        """When a job would start that is queued now, if running jobs use their time limits."""
        self.apply_due_changes()
        free_at = dict.fromkeys((name for name, host in self._hosts.items() if host.schedulable), self._now())
        for entry in self._running():
            end = entry.job.end_time or self._now() + _NO_LIMIT_S
            free_at.update((name, end) for name in entry.job.nodes if name in free_at)
        return estimate(request, free_at, self.leaves)

    def drain(self, node: str, reason: str, state: NodeState = NodeState.DRAIN) -> None:
        """Sets DRAIN, or FAIL, and the reason."""
        host = self._host(f"drain {node}", node)
        states = host.node.states | {state}
        host.node = replace(host.node, states=states, reason=reason, reason_at=self._now())
        self.apply_due_changes()

    def down(self, node: str, reason: str) -> None:
        """Sets DRAIN, then DOWN. Every job on the node loses the node."""
        self.drain(node, reason)
        self._set_down(node)
        self.apply_due_changes()

    def resume(self, node: str) -> None:
        """Clears DRAIN and DOWN."""
        host = self._host(f"resume {node}", node)
        states = host.node.states - {NodeState.DRAIN, NodeState.DOWN, NodeState.FAIL}
        host.node = replace(host.node, states=states, reason="", reason_at=None)
        if host.lost_at is not None:
            host.lost_at = self._now()
        self.apply_due_changes()

    def remove_node(self, job: int, node: str) -> None:
        """Removes `node` from the running `job`."""
        operation = f"remove {node} from job {job}"
        entry = self._entry(operation, job)
        self.apply_due_changes()
        current = entry.job
        if node not in current.nodes:
            return
        if current.state is not JobState.RUNNING:
            raise SlurmRefused(operation, f"Job has already finished for job {job}")
        if node == current.batch_host or current.batch_host not in current.nodes:
            words = f"You cannot remove the batch host from a job when resizing ({current.batch_host})"
            raise BatchHostRefused(operation, words)
        self._changed(entry, replace(current, nodes=tuple(name for name in current.nodes if name != node)))
        self.apply_due_changes()

    def requeue(self, job: int, exclude: Collection[str], restarts: int | None, admit: Collection[str] = ()) -> None:
        """Requeues `job` so that it can start at once. `exclude` adds excluded nodes, `admit` removes them."""
        entry = self._entry(f"requeue job {job}", job)
        self.apply_due_changes()
        if entry.job.state is JobState.CANCELLED:
            raise SlurmRefused(f"requeue job {job}", error_messages.CANCELLED)
        if entry.job.state is not JobState.PENDING:
            if restarts is not None and entry.job.restart_count > restarts:
                return
            if not entry.job.requeue:
                raise SlurmRefused(f"requeue job {job}", "Requested operation is presently disabled")
            self._to_queue(entry, 0.0)
        entry.begin = 0.0
        excluded = updated_exclusions(entry.job.excluded, exclude, admit)
        self._changed(entry, replace(entry.job, excluded=excluded, reason="", held=False))
        self.apply_due_changes()

    def update(
        self, operation: str, job: int, *, requeue: bool | None = None, comment: str = "", admin_comment: str = ""
    ) -> None:
        """Changes the requeue flag or the comments of a job that has not ended. An empty comment changes nothing."""
        entry = self._entry(operation, job)
        self.apply_due_changes()
        if entry.job.state.ended:
            raise SlurmRefused(operation, f"Job has already finished for job {job}")
        flag = entry.job.requeue if requeue is None else requeue
        comment, admin_comment = comment or entry.job.comment, admin_comment or entry.job.admin_comment
        self._changed(entry, replace(entry.job, requeue=flag, comment=comment, admin_comment=admin_comment))

    def charge(self, job: int, account: str) -> None:
        """Has an account pay for the job."""
        entry = self._entry(f"update job {job}", job)
        self._changed(entry, replace(entry.job, account=account))

    def cancel(self, job: int) -> None:
        """Ends `job` with CANCELLED. An unknown job, or one that has ended, does not change."""
        if (entry := self._entries.get(job)) and not entry.job.state.ended:
            self._end(entry, JobState.CANCELLED, exit_signal=15)

    def complete(self, job: int, exit_code: int) -> None:
        """Ends `job` as the end of its batch script does: COMPLETED, or FAILED with the exit code."""
        if (entry := self._entries.get(job)) and not entry.job.state.ended:
            state = JobState.FAILED if exit_code else JobState.COMPLETED
            self._end(entry, state, exit_code=exit_code, reason="NonZeroExitCode" if exit_code else "")

    def suspend(self, job: int) -> None:
        """Stops `job`, which runs, as `scontrol suspend` does: it keeps its nodes. Its time limit stands still."""
        entry = self._entry(f"suspend job {job}", job)
        self._changed(entry, replace(entry.job, state=JobState.SUSPENDED))

    def resume_job(self, job: int) -> None:
        """Lets a suspended `job` go on."""
        entry = self._entry(f"resume job {job}", job)
        self._changed(entry, replace(entry.job, state=JobState.RUNNING))

    # The rules

    def apply_due_changes(self) -> None:
        """Applies all state changes that are due now. Idempotent."""
        for name, host in self._hosts.items():
            silent = 0.0 if host.lost_at is None else self._now() - host.lost_at
            if silent >= NOT_RESPONDING_AFTER and not host.node.not_responding:
                host.node = replace(host.node, states=host.node.states | {NodeState.NOT_RESPONDING})
            if silent >= DOWN_AFTER and not host.node.down:
                self._set_down(name)
        for entry in self._running():
            if entry.job.end_time is not None and self._now() >= entry.job.end_time:
                self._end(entry, JobState.TIMEOUT, reason="TimeLimit")
        self._schedule()

    def _set_down(self, name: str) -> None:
        host = self._hosts[name]
        why = host.node.reason or "Not responding"
        host.node = replace(host.node, states=host.node.states | {NodeState.DOWN}, reason=why)
        for entry in [entry for entry in self._running() if name in entry.job.nodes]:
            rest = tuple(other for other in entry.job.nodes if other != name)
            if entry.request.no_kill and rest:
                self._changed(entry, replace(entry.job, nodes=rest))
            else:
                self._fail(entry)

    def _fail(self, entry: _JobEntry) -> None:
        """Applies Slurm's rule for a job that has lost a node it needs: requeue, or NODE_FAIL."""
        if entry.job.requeue:
            self._to_queue(entry, self._now() + REQUEUE_DELAY)
        else:
            self._end(entry, JobState.NODE_FAIL, exit_code=1, reason="NodeDown")

    def _schedule(self) -> None:
        taken = {name for entry in self._running() for name in entry.job.nodes}
        for entry in self._entries.values():
            if entry.job.state is JobState.PENDING:
                taken |= self._try_start(entry, taken)

    def _try_start(self, entry: _JobEntry, taken: Collection[str]) -> frozenset[str]:
        """Starts a pending job if possible. Returns the nodes that the job got."""
        reason = self._pending_reason(entry)
        free = [
            name
            for name, host in self._hosts.items()
            if host.schedulable
            and name not in taken
            and name not in entry.job.excluded
            and (not entry.request.required_nodes or name in entry.request.required_nodes)
        ]
        reason = reason or ("Resources" if len(free) < entry.request.nodes else "")
        if reason:
            if reason != entry.job.reason:
                self._changed(entry, replace(entry.job, reason=reason))
            return frozenset()
        now, limit = self._now(), entry.job.time_limit_s
        got = tuple(free[: entry.request.nodes])
        if failing := self.prolog_fails_on.intersection(got):
            self._hold_after_launch(entry, failing)
            return frozenset()
        started = replace(
            entry.job, state=JobState.RUNNING, reason="", nodes=got, batch_host=got[0], start_time=now,
            end_time=None if limit is None else now + limit,
        )  # fmt: skip
        entry.script_lives = True
        self._changed(entry, started)
        return frozenset(got)

    def _hold_after_launch(self, entry: _JobEntry, failing: Collection[str]) -> None:
        """A failed Prolog drains its node, and the job is held in the queue."""
        self._to_queue(entry, 0.0)
        self._changed(entry, replace(entry.job, held=True, reason="launch failed requeued held"))
        for name in failing:
            self.drain(name, "Prolog error")

    def _pending_reason(self, entry: _JobEntry) -> str:
        """Slurm's reason why a pending job cannot start; "" if it can."""
        if entry.job.held:
            return entry.job.reason
        if self._now() < entry.begin:
            return "BeginTime"
        for kind, ids in re.findall(r"(after\w+):([\d:]+)", entry.job.dependency):
            states = [self._entries[id].job.state for id in map(int, ids.split(":")) if id in self._entries]
            if not all(state.ended for state in states):
                return "Dependency"
            if kind == "afterok" and any(state is not JobState.COMPLETED for state in states):
                return "DependencyNeverSatisfied"
        return ""

    def _to_queue(self, entry: _JobEntry, begin: float) -> None:
        entry.begin = begin
        waiting = replace(
            entry.job, state=JobState.PENDING, nodes=(), batch_host="", reason="BeginTime" if begin else "",
            restart_count=entry.job.restart_count + 1, start_time=None, end_time=None,
            exit_code=None, exit_signal=None,
        )  # fmt: skip
        self._changed(entry, waiting)

    def _end(
        self,
        entry: _JobEntry,
        state: JobState,
        *,
        exit_code: int = 0,
        exit_signal: int | None = None,
        reason: str = "",
    ) -> None:
        ended = replace(
            entry.job, state=state, exit_code=exit_code, exit_signal=exit_signal, reason=reason,
            end_time=self._now(),
        )  # fmt: skip
        self._changed(entry, ended)
        self._schedule()

    def _changed(self, entry: _JobEntry, job: Job) -> None:
        entry.job = job
        if self._on_change:
            self._on_change(job)

    def _running(self) -> list[_JobEntry]:
        return [entry for entry in self._entries.values() if entry.job.state is JobState.RUNNING]

    def _batch_on(self, node: str) -> list[_JobEntry]:
        return [entry for entry in self._running() if entry.job.batch_host == node]

    def _host(self, operation: str, node: str) -> _NodeEntry:
        if node not in self._hosts:
            raise SlurmRefused(operation, f"Invalid node name specified ({node})")
        return self._hosts[node]

    def _entry(self, operation: str, job: int) -> _JobEntry:
        if job not in self._entries:
            raise SlurmRefused(operation, f"Invalid job id specified for job {job}")
        return self._entries[job]


def _with_base(node: Node, busy: bool) -> Node:
    """Adds the base state to the flags, as Slurm shows them."""
    flags = node.states - {NodeState.IDLE, NodeState.ALLOCATED}
    if NodeState.DOWN in flags:
        return replace(node, states=flags)
    return replace(node, states=flags | {NodeState.ALLOCATED if busy else NodeState.IDLE})
