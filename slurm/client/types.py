"""Slurm's data as Muster uses it (nodes, jobs, topology), and the Protocol `Slurm` that every backend implements.

A query has three kinds of answers. Recovery depends on the difference:

- a `Job` or `Node`: Slurm answered, and the job or node exists;
- `Gone`: Slurm answered that there is no such job or node (it never existed, or Slurm purged it after MinJobAge);
- `Unknown`: Slurm did not answer in time, or it reported an error of its own. Nothing may be concluded from it.

Queries return `Unknown` and do not raise. Commands (drain, requeue, ...) return None if Slurm accepted them, and raise
a `SlurmError` (errors.py) otherwise. Every command except `submit` is idempotent: after a `SlurmTimeout` the caller may
repeat it.

Times are Unix seconds as float; None if Slurm has no value. Every `timeout_s` is in seconds, for the whole call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from muster.fabric.sources.slurm_topology import SlurmTopology
from muster.slurm.client.deadline import DEFAULT_TIMEOUT_S
from muster.slurm.client.states import JobFlag, JobState, NodeState


@dataclass(frozen=True, slots=True)
class Unknown:
    """Slurm did not answer the query; `reason` says why. Never treat it as `Gone`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """Slurm answered that it has no such job or node."""


GONE: Final = Gone()


@dataclass(frozen=True, slots=True)
class Node:
    """One node as slurmctld shows it.

    `states` holds the base state and all flags. If Slurm reports an unknown state word, `states` holds
    `NodeState.UNRECOGNISED`, and `unrecognised` holds the word.
    """

    name: str
    states: frozenset[NodeState]
    address: str = ""
    hostname: str = ""
    reason: str = ""
    reason_at: float | None = None
    boot_time: float | None = None
    partitions: tuple[str, ...] = ()
    gres: str = ""
    memory_mib: int = 0
    unrecognised: tuple[str, ...] = ()

    @property
    def drained(self) -> bool:
        """Whether an operator or a program has told Slurm to start no new job on the node (DRAIN or FAIL)."""
        return bool(self.states & {NodeState.DRAIN, NodeState.FAIL})

    @property
    def down(self) -> bool:
        """Whether Slurm has declared the node dead (base state DOWN) and removed it from its jobs."""
        return NodeState.DOWN in self.states

    @property
    def not_responding(self) -> bool:
        """Whether slurmctld cannot reach slurmd. This alone does not prove a failure."""
        return NodeState.NOT_RESPONDING in self.states


@dataclass(frozen=True, slots=True)
class Job:
    """One job as slurmctld shows it. `nodes` is the current allocation, expanded, in Slurm's order."""

    id: int
    state: JobState
    flags: frozenset[JobFlag] = frozenset()
    name: str = ""
    user_id: int = -1
    user_name: str = ""
    partition: str = ""
    account: str = ""
    """Whom Slurm charges for it."""
    reason: str = ""
    nodes: tuple[str, ...] = ()
    batch_host: str = ""
    """The host of the batch script. Slurm never changes it while the job runs: the job may have lost this node."""
    excluded: tuple[str, ...] = ()
    restart_count: int = 0
    exit_code: int | None = None
    """0 to 255; None while the job has not ended."""
    exit_signal: int | None = None
    """The signal that ended the job; None if no signal did."""
    start_time: float | None = None
    end_time: float | None = None
    """The time of the end. While the job runs, the time at which its time limit ends it."""
    time_limit_s: int | None = None
    comment: str = ""
    admin_comment: str = ""
    requeue: bool = False
    """Whether Slurm may requeue the job on its own."""
    held: bool = False
    dependency: str = ""
    work_dir: str = ""
    array_task: str = ""
    """The name that Slurm shows of a task of an array job: "42_1". Empty: no such task."""
    switches: str = ""
    """What the job asks of its leaf switches, as scontrol takes it: "2@0:05:00". Empty: nothing, or nobody knows."""
    unrecognised: tuple[str, ...] = ()

    @property
    def final(self) -> bool:
        """Whether the job has ended, will not be requeued, and its nodes are free again (COMPLETING is over)."""
        return self.state.ended and not self.flags & {
            JobFlag.COMPLETING,
            JobFlag.REQUEUED,
            JobFlag.REQUEUE_FED,
        }

    @property
    def held_nodes(self) -> tuple[str, ...]:
        """The nodes that the job has now. Slurm shows those of the last run while a requeued job waits."""
        return self.nodes if self.state.holds_nodes else ()

    @property
    def running(self) -> bool:
        """Whether the job's processes may run: RUNNING and not COMPLETING."""
        return self.state is JobState.RUNNING and JobFlag.COMPLETING not in self.flags


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition. `topology`: the name of its topology; empty: the default. `nodes`: all its nodes, whatever their
    state."""

    name: str
    topology: str = ""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StartEstimate:
    """When a job would start, if it were queued now. Slurm assumes that running jobs use their whole time limits."""

    start: float
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NeverStarts:
    """Slurm would refuse the job; `reason` has its words."""

    reason: str


JobAnswers = Mapping[int, Job | Gone]
NodeAnswers = Mapping[str, Node | Gone]


def updated_exclusions(now: Sequence[str], exclude: Collection[str], admit: Collection[str]) -> tuple[str, ...]:
    """Returns the excluded nodes `now` of a job, plus `exclude`, minus `admit`."""
    kept = [node for node in now if node in exclude or node not in admit]
    return (*kept, *sorted(set(exclude) - set(kept)))


@runtime_checkable
class Slurm(Protocol):
    """The interface to one Slurm cluster. Implementations: backends/commands.py, backends/pyslurm_backend.py,
    fake/fake_slurm.py.
    """

    async def jobs(
        self,
        ids: Collection[int] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        in_doubt: Collection[int] = (),
    ) -> JobAnswers | Unknown:
        """Returns the requested jobs; each id is a key of the answer. None requests all jobs that Slurm has, including
        ended jobs. `in_doubt`: jobs whose flags are all needed, also where that costs one more command.
        """
        ...

    async def nodes(
        self, names: Collection[str] | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> NodeAnswers | Unknown:
        """Returns the requested nodes; each name is a key of the answer. None requests all nodes."""
        ...

    async def topologies(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[SlurmTopology, ...] | Unknown:
        """Returns all topologies of Slurm's configuration, the default first. At least one: a flat one if there is no
        other.
        """
        ...

    async def partitions(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Mapping[str, Partition] | Unknown:
        """Returns all partitions by name."""
        ...

    async def drain(self, node: str, reason: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Sets DRAIN: no new job starts on `node`, running jobs continue. Only operators and the Slurm user may do
        this.
        """
        ...

    async def down(self, node: str, reason: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Sets DRAIN, then DOWN. Slurm removes `node` from --no-kill jobs at once, and kills every other job on it.

        DRAIN comes first. Otherwise a slurmd that registers again under ReturnToService=2 sets the node back to IDLE.
        """
        ...

    async def resume(self, node: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Clears DRAIN and DOWN. A node whose slurmd does not answer remains NOT_RESPONDING."""
        ...

    async def remove_node(self, job: int, node: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Removes `node` from the running `job`. Slurm kills the job's processes there; the other processes continue.

        It is no error if the job does not have the node: an earlier call has removed it.

        Raises:
            BatchHostRefused: `node` is the batch host, or the job has already lost its batch host.
        """
        ...

    async def requeue(
        self,
        job: int,
        exclude: Collection[str] = (),
        admit: Collection[str] = (),
        *,
        restarts: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Requeues `job` so that it starts as soon as possible.

        A pending job only gets the new excluded nodes and start time.

        Args:
            exclude: nodes on which the job must not start.
            admit: nodes to remove from the job's excluded nodes.
            restarts: the job's restart count when the requeue was decided. If the job has restarted since, nothing
                happens. This makes the call idempotent.
        """
        ...

    async def set_requeue_flag(self, job: int, flag: bool, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Sets whether Slurm may requeue `job` on its own (node failure, preemption, exit code policy)."""
        ...

    async def set_comments(
        self, job: int, comment: str = "", admin_comment: str = "", *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Replaces the comment of `job`, which squeue and sacct show, and its AdminComment, in one call. An empty one
        stays as it is. Only operators and the Slurm user may change an AdminComment.
        """
        ...

    async def cancel(self, job: int, signal: int | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Cancels `job`, or sends `signal` to every process of its steps. A job that has ended is no error."""
        ...

    async def complete_job(self, job: int, exit_code: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Ends the running `job` as if its batch script had returned `exit_code` (0 to 255).

        This is for a job whose batch host died: nobody else reports its end. The job's owner and the Slurm user may do
        this. A job that has ended is no error.
        """
        ...

    async def submit(
        self,
        script: Path,
        options: Sequence[str] = (),
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int:
        """Runs `sbatch OPTIONS SCRIPT` in `cwd` with environment `env` (None: this process's own). Returns the job id.

        Not idempotent: after a `SlurmTimeout`, look for the job by name before you submit again.
        """
        ...

    async def estimate_start(
        self,
        script: Path,
        options: Sequence[str] = (),
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> StartEstimate | NeverStarts | Unknown:
        """When the job would start that `submit` with the same arguments would queue. Queues nothing."""
        ...

    async def max_switch_wait_s(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int | Unknown:
        """The longest time that a job may wait for its `--switches`. Slurm cuts longer times without a word."""
        ...

    async def private_data(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> frozenset[str] | Unknown:
        """What Slurm shows to nobody but its owner and operators: words of PrivateData, such as "jobs"."""
        ...

    async def aclose(self) -> None:
        """Ends worker processes. Do not use the object afterwards."""
        ...
