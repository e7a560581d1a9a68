"""A Slurm cluster in memory: the rules that recovery depends on, measured on Slurm 26.05, and nothing else.

It holds no thread, socket or clock of its own: `now` is an input, and whoever owns the cluster says what
happens to its nodes (`lose`, `recover`) and its batch scripts (`finish`). Whole nodes are given to one job at
a time, first come, first served.

The rules (tests/cluster/test_slurm_rules.py holds them against a real Slurm):
- a lost node is NOT_RESPONDING after 16 s and DOWN after 29 s, and only then leaves its jobs;
- a --no-kill job of several nodes runs on without a node that goes DOWN; any other is requeued or fails;
- the batch host is never rewritten while the job runs; without it the job can't shrink, and nobody reports
  its end;
- the end of a batch script ends its job, also when its node was set DOWN and the job runs on elsewhere;
- a batch script that has died with its host is missed when the host's slurmd registers again, but not within 20 s
  of the job's start (BatchStartTimeout and MessageTimeout); after that nobody asks for half an hour;
- DRAIN outlives a slurmd that registers again, DOWN alone does not (ReturnToService=2);
- a requeued job that was not told otherwise waits 121 s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from muster.slurm.client.errors import BatchHostRefused, SlurmRefused
from muster.slurm.client.parsing import refusals
from muster.slurm.client.parsing.sbatch_request import JobRequest
from muster.slurm.client.states import JobState, NodeState
from muster.slurm.client.types import Job, Node, Topology, excluding

NOT_RESPONDING_AFTER: Final = 16.0
DOWN_AFTER: Final = 29.0
REQUEUE_DELAY: Final = 121.0
SCRIPT_STARTS_S: Final = 20.0


@dataclass(slots=True)
class _Entry:
    """A job and what Slurm keeps about it beside what it shows."""

    job: Job
    request: JobRequest
    begin: float = 0.0
    script_lives: bool = False
    """The batch script runs, on whatever its batch host has become; its end ends the job."""


@dataclass(slots=True)
class _Host:
    """A node: what Slurm shows of it, and whether its slurmd answers (`lost_at` is None)."""

    node: Node
    lost_at: float | None = None

    @property
    def fit(self) -> bool:
        """Whether Slurm would start a job here: a dead node looks fit until it knows."""
        return not (self.node.drained or self.node.down or self.node.not_responding)


class FakeCluster:
    """The state of one cluster and the rules by which it changes. Times are Unix seconds from `now`."""

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
        self.topology = Topology(leaves or {})
        self._hosts = {
            name: _Host(Node(name, frozenset({NodeState.IDLE}), address=name, boot_time=now())) for name in nodes
        }
        self._entries: dict[int, _Entry] = {}

    # What Slurm shows

    def nodes(self) -> dict[str, Node]:
        """All nodes as Slurm sees them now."""
        self.settle()
        busy = {name for entry in self._running() for name in entry.job.nodes}
        return {name: _with_base(host.node, name in busy) for name, host in self._hosts.items()}

    def jobs(self) -> dict[int, Job]:
        """All jobs, ended ones too."""
        self.settle()
        return {id: entry.job for id, entry in self._entries.items()}

    # What happens to the hardware and the scripts

    def lose(self, node: str, *, power: bool = True) -> None:
        """`node` falls silent; Slurm finds out in its own time. Without `power` its processes live (a partition)."""
        self._host("lose a node", node).lost_at = self._now()
        for entry in self._batch_on(node) if power else ():
            entry.script_lives = False

    def recover(self, node: str) -> None:
        """The slurmd of `node` registers again: back to service unless DRAIN was set.

        A batch script of a job that has lost the node meanwhile is killed, and the job runs on; a job that still
        has the node but whose batch script is no more is requeued or fails, unless that may be about to start.
        """
        host = self._host("recover a node", node)
        self.settle()
        host.lost_at = None
        host.node = replace(host.node, states=host.node.states - {NodeState.NOT_RESPONDING, NodeState.DOWN})
        for entry in self._batch_on(node):
            if node not in entry.job.nodes:
                entry.script_lives = False
            elif not entry.script_lives and self._now() - (entry.job.start_time or 0.0) > SCRIPT_STARTS_S:
                self._fail(entry)
        self.settle()

    def finish(self, job: int, exit_code: int = 0) -> bool:
        """The batch script of `job` returned. False, and nothing happens, if it is dead or cut off.

        It ends the job also when its node was set DOWN under it and taken out of the job.
        """
        entry = self._entry("finish", job)
        self.settle()
        if not entry.job.running or not entry.script_lives:
            return False
        if self._hosts[entry.job.batch_host].lost_at is not None:
            return False
        self.complete(job, exit_code)
        return True

    def adopt(self, job: int, node: str, uid: int) -> None:
        """`node` works for `job` of `uid` already: how a cluster without a queue (`muster run --local`) comes to be.

        Twice changes nothing; a node that left the job, or a job that ended, stays so.
        """
        if node in self._hosts:
            return
        known = Node(node, frozenset({NodeState.IDLE}), address="127.0.0.1", boot_time=self._now())
        self._hosts[node] = _Host(known)
        entry = self._entries.get(job)
        if entry is None:
            running = Job(
                job, JobState.RUNNING, name="local", user_id=uid, nodes=(node,), batch_host=node, start_time=self._now()
            )
            self._entries[job] = _Entry(running, JobRequest(name="local", no_kill=True, requeue=False))
            self._changed(self._entries[job], running)
        elif entry.job.state is JobState.RUNNING:
            self._changed(entry, replace(entry.job, nodes=(*entry.job.nodes, node)))

    # What Slurm is told. SlurmRefused in Slurm's own words.

    def submit(self, request: JobRequest) -> int:
        """Queues a job; it starts as soon as there are nodes for it. Returns its id."""
        if request.nodes > len(self._hosts):
            raise SlurmRefused("submit a job", "Requested node configuration is not available")
        id = len(self._entries) + 1
        job = Job(
            id,
            JobState.PENDING,
            name=request.name,
            user_id=self._user[0],
            user_name=self._user[1],
            excluded=request.exclude,
            submit_time=self._now(),
            time_limit_s=request.time_limit_s,
            comment=request.comment,
            requeue=request.requeue,
            dependency=request.dependency,
            work_dir=request.work_dir,
        )
        self._entries[id] = _Entry(job, request, begin=self._now() + request.delay_s)
        self._changed(self._entries[id], job)
        self.settle()
        return id

    def drain(self, node: str, reason: str) -> None:
        """Sets DRAIN and the reason."""
        host = self._host(f"drain {node}", node)
        states = host.node.states | {NodeState.DRAIN}
        host.node = replace(host.node, states=states, reason=reason, reason_by="slurm", reason_at=self._now())
        self.settle()

    def down(self, node: str, reason: str) -> None:
        """Sets DRAIN, then DOWN: every job there loses the node."""
        self.drain(node, reason)
        self._set_down(node)
        self.settle()

    def resume(self, node: str) -> None:
        """Takes DRAIN and DOWN off."""
        host = self._host(f"resume {node}", node)
        states = host.node.states - {NodeState.DRAIN, NodeState.DOWN, NodeState.FAIL}
        host.node = replace(host.node, states=states, reason="", reason_by="", reason_at=None)
        if host.lost_at is not None:
            host.lost_at = self._now()
        self.settle()

    def shrink(self, job: int, node: str) -> None:
        """Takes `node` out of the running `job`."""
        what = f"let go of {node} of job {job}"
        entry = self._entry(what, job)
        self.settle()
        now = entry.job
        if node not in now.nodes:
            return
        if now.state is not JobState.RUNNING:
            raise SlurmRefused(what, f"Job has already finished for job {job}")
        if node == now.batch_host or now.batch_host not in now.nodes:
            words = f"You cannot remove the batch host from a job when resizing ({now.batch_host})"
            raise BatchHostRefused(what, words)
        self._changed(entry, replace(now, nodes=tuple(name for name in now.nodes if name != node)))
        self.settle()

    def requeue(self, job: int, exclude: Collection[str], restarts: int | None, admit: Collection[str] = ()) -> None:
        """Back to the queue, without the nodes in `exclude`, with those in `admit`, free to start at once."""
        entry = self._entry(f"requeue job {job}", job)
        self.settle()
        if entry.job.state is JobState.CANCELLED:
            raise SlurmRefused(f"requeue job {job}", refusals.CANCELLED)
        if entry.job.state is not JobState.PENDING:
            if restarts is not None and entry.job.restart_count > restarts:
                return
            if not entry.job.requeue:
                raise SlurmRefused(f"requeue job {job}", "Requested operation is presently disabled")
            self._to_queue(entry, 0.0)
        entry.begin = 0.0
        excluded = excluding(entry.job.excluded, exclude, admit)
        self._changed(entry, replace(entry.job, excluded=excluded, reason=""))
        self.settle()

    def update(self, what: str, job: int, *, requeue: bool | None = None, comment: str | None = None) -> None:
        """Changes what can be changed of a job that has not ended."""
        entry = self._entry(what, job)
        self.settle()
        if entry.job.state.ended:
            raise SlurmRefused(what, f"Job has already finished for job {job}")
        flag = entry.job.requeue if requeue is None else requeue
        text = entry.job.comment if comment is None else comment
        self._changed(entry, replace(entry.job, requeue=flag, comment=text))

    def cancel(self, job: int) -> None:
        """Ends `job` CANCELLED; one that has ended or never was stays as it is."""
        if (entry := self._entries.get(job)) and not entry.job.state.ended:
            self._end(entry, JobState.CANCELLED, exit_signal=15)

    def complete(self, job: int, exit_code: int) -> None:
        """Ends `job` as its batch script's end does: COMPLETED, or FAILED with its code."""
        if (entry := self._entries.get(job)) and not entry.job.state.ended:
            state = JobState.FAILED if exit_code else JobState.COMPLETED
            self._end(entry, state, exit_code=exit_code, reason="NonZeroExitCode" if exit_code else "")

    # The rules

    def settle(self) -> None:
        """Lets everything happen that is due by now. Doing it twice changes nothing."""
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

    def _fail(self, entry: _Entry) -> None:
        """What Slurm does with a job that has lost a node it can't do without."""
        if entry.job.requeue:
            self._to_queue(entry, self._now() + REQUEUE_DELAY)
        else:
            self._end(entry, JobState.NODE_FAIL, exit_code=1, reason="NodeDown")

    def _schedule(self) -> None:
        taken = {name for entry in self._running() for name in entry.job.nodes}
        for entry in self._entries.values():
            if entry.job.state is JobState.PENDING:
                taken |= self._try_start(entry, taken)

    def _try_start(self, entry: _Entry, taken: Collection[str]) -> frozenset[str]:
        """Starts a pending job if it may and can; the nodes it got."""
        reason = self._obstacle(entry)
        free = [
            name
            for name, host in self._hosts.items()
            if host.fit
            and name not in taken
            and name not in entry.job.excluded
            and (not entry.request.only or name in entry.request.only)
        ]
        reason = reason or ("Resources" if len(free) < entry.request.nodes else "")
        if reason:
            if reason != entry.job.reason:
                self._changed(entry, replace(entry.job, reason=reason))
            return frozenset()
        now, limit = self._now(), entry.job.time_limit_s
        got = tuple(free[: entry.request.nodes])
        started = replace(
            entry.job, state=JobState.RUNNING, reason="", nodes=got, batch_host=got[0], start_time=now,
            end_time=None if limit is None else now + limit,
        )  # fmt: skip
        entry.script_lives = True
        self._changed(entry, started)
        return frozenset(got)

    def _obstacle(self, entry: _Entry) -> str:
        """Slurm's reason why a pending job may not start, "" if it may."""
        if self._now() < entry.begin:
            return "BeginTime"
        for kind, ids in re.findall(r"(after\w+):([\d:]+)", entry.job.dependency):
            states = [self._entries[id].job.state for id in map(int, ids.split(":")) if id in self._entries]
            if not all(state.ended for state in states):
                return "Dependency"
            if kind == "afterok" and any(state is not JobState.COMPLETED for state in states):
                return "DependencyNeverSatisfied"
        return ""

    def _to_queue(self, entry: _Entry, begin: float) -> None:
        entry.begin = begin
        waiting = replace(
            entry.job, state=JobState.PENDING, nodes=(), batch_host="", reason="BeginTime" if begin else "",
            restart_count=entry.job.restart_count + 1, start_time=None, end_time=None,
            exit_code=None, exit_signal=None,
        )  # fmt: skip
        self._changed(entry, waiting)

    def _end(
        self,
        entry: _Entry,
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

    def _changed(self, entry: _Entry, job: Job) -> None:
        entry.job = job
        if self._on_change:
            self._on_change(job)

    def _running(self) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.job.state is JobState.RUNNING]

    def _batch_on(self, node: str) -> list[_Entry]:
        return [entry for entry in self._running() if entry.job.batch_host == node]

    def _host(self, what: str, node: str) -> _Host:
        if node not in self._hosts:
            raise SlurmRefused(what, f"Invalid node name specified ({node})")
        return self._hosts[node]

    def _entry(self, what: str, job: int) -> _Entry:
        if job not in self._entries:
            raise SlurmRefused(what, f"Invalid job id specified for job {job}")
        return self._entries[job]


def _with_base(node: Node, busy: bool) -> Node:
    """Adds the base state to the flags, as Slurm shows them."""
    flags = node.states - {NodeState.IDLE, NodeState.ALLOCATED}
    if NodeState.DOWN in flags:
        return replace(node, states=flags)
    return replace(node, states=flags | {NodeState.ALLOCATED if busy else NodeState.IDLE})
