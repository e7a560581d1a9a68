"""What Muster knows of Slurm: nodes, jobs, topology, and the `Slurm` Protocol that every backend implements.

Three answers are kept apart everywhere, because recovery acts on the difference:

- a `Job` or `Node`: Slurm answered and has it;
- `Gone`: Slurm answered and does not have it (never existed, or was purged after MinJobAge);
- `Unknown`: Slurm did not answer in time, or answered with an error of its own. Nothing follows from it.

Queries return `Unknown`, they do not raise. Commands (drain, requeue, ...) return None when Slurm accepted
them and raise a `SlurmError` (errors.py) otherwise. Every command is idempotent: after a `SlurmTimeout`,
whose outcome is not known, it may simply be given again. `submit` alone is not.

Times are Unix seconds as float, None where Slurm has none. Deadlines are seconds for the whole call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from muster.slurm.client.states import JobFlag, JobState, NodeState

DEFAULT_DEADLINE: Final = 5.0
"""Seconds for a whole call unless the caller says otherwise; a healthy slurmctld never needs them."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Slurm did not answer the question; `reason` says why in words. Never to be read as "gone"."""

    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """Slurm answered that it has no such job or node."""


GONE: Final = Gone()


@dataclass(frozen=True, slots=True)
class Node:
    """One node as slurmctld sees it.

    `states` holds the base state and every flag; a word that this version does not know appears there as
    `NodeState.UNRECOGNISED` and word for word in `unrecognised`.
    """

    name: str
    states: frozenset[NodeState]
    address: str = ""
    hostname: str = ""
    reason: str = ""
    reason_by: str = ""
    reason_at: float | None = None
    boot_time: float | None = None
    slurmd_start_time: float | None = None
    last_busy: float | None = None
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    gres: str = ""
    cpus: int = 0
    memory_mib: int = 0
    version: str = ""
    unrecognised: tuple[str, ...] = ()

    @property
    def drained(self) -> bool:
        """True while Slurm starts no new job here because someone asked for that (DRAIN or FAIL)."""
        return bool(self.states & {NodeState.DRAIN, NodeState.FAIL})

    @property
    def down(self) -> bool:
        """True while Slurm has declared the node dead (base state DOWN) and told its jobs."""
        return NodeState.DOWN in self.states

    @property
    def not_responding(self) -> bool:
        """True while slurmctld can't reach slurmd; by itself no proof of anything."""
        return NodeState.NOT_RESPONDING in self.states


@dataclass(frozen=True, slots=True)
class Job:
    """One job as slurmctld sees it. `nodes` is the allocation now, expanded, in Slurm's order."""

    id: int
    state: JobState
    flags: frozenset[JobFlag] = frozenset()
    name: str = ""
    user_id: int = -1
    user_name: str = ""
    account: str = ""
    partition: str = ""
    reason: str = ""
    nodes: tuple[str, ...] = ()
    batch_host: str = ""
    """Never rewritten by Slurm while the job runs: it may name a node that the job has lost."""
    excluded: tuple[str, ...] = ()
    restart_count: int = 0
    exit_code: int | None = None
    """What the job returned, 0 to 255; None while it has not ended."""
    exit_signal: int | None = None
    """The signal that ended it, if one did."""
    submit_time: float | None = None
    start_time: float | None = None
    end_time: float | None = None
    """When it ended; while it runs, when its time limit ends it."""
    time_limit_s: int | None = None
    comment: str = ""
    requeue: bool = False
    """Whether Slurm may requeue it by itself."""
    held: bool = False
    dependency: str = ""
    work_dir: str = ""
    unrecognised: tuple[str, ...] = ()

    @property
    def final(self) -> bool:
        """True when the job has ended for good and its nodes are free again (COMPLETING is over)."""
        return self.state.ended and not self.flags & {
            JobFlag.COMPLETING,
            JobFlag.REQUEUED,
            JobFlag.REQUEUE_FED,
        }

    @property
    def running(self) -> bool:
        """True while its processes may run: RUNNING, and not already being torn down."""
        return self.state is JobState.RUNNING and JobFlag.COMPLETING not in self.flags


@dataclass(frozen=True, slots=True)
class Topology:
    """Which leaf switch (or block) each node hangs on, and the tree above. Empty on a flat fabric."""

    leaves: Mapping[str, str] = field(default_factory=dict)
    """Node name to the name of its leaf switch or block."""
    parents: Mapping[str, str] = field(default_factory=dict)
    """Switch name to the name of the switch above it; a root has no entry."""

    def leaf(self, node: str) -> str | None:
        """The leaf switch of `node`, None where the fabric is flat or the node is not in it."""
        return self.leaves.get(node)


JobAnswers = Mapping[int, Job | Gone]
NodeAnswers = Mapping[str, Node | Gone]


def excluding(now: Sequence[str], exclude: Collection[str], admit: Collection[str]) -> tuple[str, ...]:
    """The nodes that a job may not have, which were `now`, with `exclude` and without `admit`."""
    kept = [node for node in now if node in exclude or node not in admit]
    return (*kept, *sorted(set(exclude) - set(kept)))


@runtime_checkable
class Slurm(Protocol):
    """One door to one Slurm cluster. Implementations: cli.py, pyslurm_backend.py, fake.py."""

    async def jobs(
        self, ids: Collection[int] | None = None, *, deadline: float = DEFAULT_DEADLINE
    ) -> JobAnswers | Unknown:
        """The jobs asked for, each id a key of the answer; with None, all that Slurm has, ended ones too."""
        ...

    async def nodes(
        self, names: Collection[str] | None = None, *, deadline: float = DEFAULT_DEADLINE
    ) -> NodeAnswers | Unknown:
        """The nodes asked for, each name a key of the answer; with None, all."""
        ...

    async def topology(self, *, deadline: float = DEFAULT_DEADLINE) -> Topology | Unknown:
        """The fabric as Slurm's topology plugin has it."""
        ...

    async def drain(self, node: str, reason: str, *, deadline: float = DEFAULT_DEADLINE) -> None:
        """No new jobs on `node`; those on it run on. For operators and the Slurm user."""
        ...

    async def down(self, node: str, reason: str, *, deadline: float = DEFAULT_DEADLINE) -> None:
        """DRAIN, then DOWN: at once taken out of --no-kill jobs; every other job on `node` is killed.

        DRAIN first, or a slurmd that registers again under ReturnToService=2 puts the node back to IDLE.
        """
        ...

    async def resume(self, node: str, *, deadline: float = DEFAULT_DEADLINE) -> None:
        """Takes DRAIN and DOWN off. A node whose slurmd does not answer stays NOT_RESPONDING."""
        ...

    async def let_go(self, job: int, node: str, *, deadline: float = DEFAULT_DEADLINE) -> None:
        """Shrinks the running `job` by `node`: its processes there are killed, the others run on.

        Raises `BatchHostRefused` where Slurm refuses because of the batch host: `node` is it, or it is no
        longer in the job at all. A node that the job does not have is no error: it has left already.
        """
        ...

    async def requeue(
        self,
        job: int,
        exclude: Collection[str] = (),
        admit: Collection[str] = (),
        *,
        restarts: int | None = None,
        deadline: float = DEFAULT_DEADLINE,
    ) -> None:
        """Requeues `job`, adds `exclude` to the nodes it may not have, takes `admit` from them, and lets it start as
        soon as it can.

        A pending job is only given its nodes and let start. With `restarts`, the restart count
        at which the requeue was decided, a job that has restarted since is left alone: what makes this
        safe to give again.
        """
        ...

    async def set_requeue_flag(self, job: int, flag: bool, *, deadline: float = DEFAULT_DEADLINE) -> None:
        """Whether Slurm may requeue `job` by itself (node failure, preemption, exit code policy)."""
        ...

    async def set_comment(self, job: int, text: str, *, deadline: float = DEFAULT_DEADLINE) -> None:
        """Replaces the comment of `job`, which squeue and sacct show."""
        ...

    async def cancel(self, job: int, signal: int | None = None, *, deadline: float = DEFAULT_DEADLINE) -> None:
        """Cancels `job`, or sends `signal` to every process of its steps. A job that ended is no error."""
        ...

    async def complete_job(self, job: int, exit_code: int, *, deadline: float = DEFAULT_DEADLINE) -> None:
        """Ends the running `job` as if its batch script had returned `exit_code` (0 to 255).

        For a job whose batch host died: nobody else reports its end. As the job's owner or the Slurm user.
        A job that has ended is no error.
        """
        ...

    async def submit(
        self,
        script: Path,
        options: Sequence[str] = (),
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        deadline: float = DEFAULT_DEADLINE,
    ) -> int:
        """sbatch OPTIONS SCRIPT in `cwd` with environment `env` (None: this process's). Returns the job id.

        Not idempotent: after a `SlurmTimeout` look for the job by its name before submitting again.
        """
        ...

    async def aclose(self) -> None:
        """Ends worker processes. The object is not used again."""
        ...
