"""The numbers of a site (policy.toml: [limits], [pool], [loss]): what Muster may do by itself, what users may use."""

from dataclasses import dataclass, field

from muster.daemon.coordinator.core.losses.loss_rule import LossRule
from muster.daemon.coordinator.core.state.state_tables import Response

GANG_KEPT_S, GANGS_KEPT = 7 * 86400.0, 1000
"""A gang that is over stays in the durable state for GANG_KEPT_S seconds, and while fewer than GANGS_KEPT newer gangs
are over. Views and snapshots hold every gang, so old ones must go."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Nodes that jobs share as spares (policy.toml, [pool])."""

    options: tuple[str, ...] = ()
    """sbatch options that select the pool; empty: the site has no pool."""
    wait_s: float = 60.0
    """Seconds that a gang waits for a node of the pool."""


@dataclass(frozen=True, slots=True)
class StragglerRule:
    """When a straggler has lasted, and what follows (policy.toml, [straggler])."""

    share: float = 0.9
    """The share of the window in which the rank was a straggler, 0 to 1."""
    window_s: float = 300.0
    response: Response = Response.RECORD


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that Muster may do."""

    nodes_per_hour: int = 20
    """Nodes taken out of service within an hour."""
    fraction: float = 0.1
    """Fraction of the known nodes that may be out of service at the same time."""
    nodes_at_least: int = 4
    """Number of nodes that may be out of service at the same time, however few are known."""
    reported_drains_per_hour_of_job: int = 2
    """Nodes drained within an hour for what only the agents of one gang have reported."""
    reported_drains_per_hour_of_user: int = 4
    """The same for all gangs of one user."""
    swaps_per_hour: int = 20
    """Nodes that one gang may lose within an hour and go on."""
    gangs_per_user: int = 1000
    """Gangs of one user that are live or were registered in the last 24 hours."""
    spec_mib_per_user: int = 64
    """MiB of the specs of those gangs, as JSON."""
    journal_mib_per_job: float = 64.0
    """MiB of records of one gang that count at the same time (see account). Larger gangs have more."""
    journal_mib_per_user: float = 512.0
    """The same for all gangs of one user."""
    lemon_after: int = 3
    """Failures of a node within 30 days with which it is named a lemon; 0: no node is."""
    node_mtbf_hours: float = 0.0
    """Hours between two failures of one node of the site; 0: as observed."""
    resume_after_check: bool = False
    """Muster resumes a node that it has drained itself, once the node has passed a check."""
    observe: bool = False
    """Observe mode: report what would be done, and leave nodes and training alone."""
    pool: Pool = Pool()
    straggler: StragglerRule | None = StragglerRule()
    """None: nothing follows from a straggler that lasts."""
    loss: LossRule = field(default_factory=LossRule)
    """What counts as a spike of the loss, and what follows, unless the job says otherwise."""
