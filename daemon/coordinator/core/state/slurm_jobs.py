"""Records of a gang: its job in Slurm, and the nodes that were requested beyond those of the job."""

from dataclasses import dataclass, field

from muster.daemon.coordinator.core.state.stored_names import keeps_stored_names


@dataclass(slots=True)
class Exclusion:
    """Why and since when (seconds) the job may not start on a node."""

    reason: str
    at: float


@dataclass(slots=True)
class SlurmJob:
    """The job that the gang is in Slurm: its runs, and its nodes."""

    job: int
    restart_count: int = 0
    job_nodes: tuple[str, ...] = ()
    most_nodes: int = 0
    """The most nodes that Slurm has reported for the job."""
    excluded: tuple[str, ...] = ()
    """Nodes that the job was ever requeued without. A node stays in the list when it is admitted: the admission may
    come too late for a start, and then changes nothing."""
    admitted: tuple[str, ...] = ()
    """Nodes of `excluded` on which the job may start again since the last requeue."""
    exclusions: dict[str, Exclusion] = field(default_factory=dict)
    """Node of `excluded` → its newest exclusion. Journals of earlier versions may lack it."""
    runs_without_start: int = 0
    """Runs of the job in a row that were given up while the gang gathered."""
    runs_given_back: int = 0
    """Runs of the job in a row that gave their nodes back, because groups would have lain wider than asked."""
    completion_owed: bool = False
    job_over: bool = False

    def run_is_over(self, job: int, restarts: int) -> bool:
        """A later run of `job` is known than the one that Slurm started after `restarts` restarts."""
        return job == self.job and restarts < self.restart_count


@keeps_stored_names
@dataclass(slots=True)
class PoolRequest:
    """A node of the shared pool that the agent on `requesting_node` was asked to request, with these options of sbatch.

    `job`: the pool job that Slurm made of the request; 0 until its number is known. `node`: the node that has joined
    from that job; empty until then. `wanted_node`, `until`: as in PoolNodeRequested.
    """

    serial: int
    requesting_node: str
    options: tuple[str, ...]
    job: int = 0
    node: str = ""
    wanted_node: str = ""
    until: float = 0.0


@dataclass(slots=True)
class Growth:
    """The nodes that were requested beyond those of the job: of the shared pool, or repaired ones."""

    pool: dict[int, PoolRequest] = field(default_factory=dict)
    """Open requests for nodes of the shared pool, by serial."""
    pool_serial: int = 0
    pool_requested_at: float = 0.0
    """When this recovery first requested a node of the pool, or began with an open request; 0: neither."""
    pool_refused: str = ""
    """Why this recovery requests no more of them."""
    last_request_at: float = 0.0
    """When a node was last requested, of the pool or a repaired one (seconds); 0: never."""
    last_growth_at: float = 0.0
    """When it was last planned that ranks go on on more nodes, or that a node of the pool gives way (seconds)."""
    requests_in_vain: int = 0
    """Requests in a row, made while the gang trained, from which no node has come."""

    def unanswered(self) -> list[PoolRequest]:
        """Requests from which no node has joined yet, but for those of repaired nodes by their names."""
        return [request for request in self.pool.values() if not request.node and not request.wanted_node]
