"""The two state machines, as literal tables.

A gang moves SUBMITTED → GATHERING → PREFLIGHT → STARTING → RUNNING; every fault leads through RECOVERING back to
STARTING, or through DRAINING to a requeue or an end. A node is FIT until evidence says otherwise.
A transition that its table does not hold is a bug: `check_gang_transition` and `check_node_transition` raise
IllegalTransition, and nothing has changed.
"""

from enum import StrEnum


class Phase(StrEnum):
    """Where a gang is."""

    SUBMITTED = "SUBMITTED"  # registered; Slurm has not started its job
    GATHERING = "GATHERING"  # Slurm has started the job; its agents attach
    PREFLIGHT = "PREFLIGHT"  # all present; the first rendezvous store opens
    STARTING = "STARTING"  # a generation was ordered to run
    RUNNING = "RUNNING"  # every rank runs
    RECOVERING = "RECOVERING"  # fence, place, restore
    DRAINING = "DRAINING"  # ranks are gone, the last checkpoint goes to durable storage
    REQUEUED = "REQUEUED"  # Slurm has it back, and will start it anew
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


FINAL = frozenset({Phase.DONE, Phase.FAILED, Phase.CANCELLED})
FENCING = frozenset({Phase.PREFLIGHT, Phase.RECOVERING})
"""All ranks shall have ended; the next generation's store opens."""
ACTIVE = FENCING | {Phase.STARTING, Phase.RUNNING}
"""Ranks run, or shall run: every member is expected to be in touch."""
MONITORED = ACTIVE | {Phase.DRAINING}
"""Who falls silent is asked after: it carries a rank, or holds a part of the last checkpoint."""
EARLY_ENDS = frozenset({Phase.FAILED, Phase.CANCELLED})
"""Ends that may come at any moment."""

GANG_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.SUBMITTED: frozenset({Phase.GATHERING}) | EARLY_ENDS,
    Phase.GATHERING: frozenset({Phase.PREFLIGHT, Phase.REQUEUED}) | EARLY_ENDS,
    Phase.PREFLIGHT: frozenset({Phase.STARTING, Phase.REQUEUED}) | EARLY_ENDS,
    Phase.STARTING: frozenset({Phase.RUNNING, Phase.RECOVERING, Phase.REQUEUED}) | EARLY_ENDS,
    Phase.RUNNING: frozenset({Phase.RECOVERING, Phase.DRAINING, Phase.REQUEUED, Phase.DONE}) | EARLY_ENDS,
    Phase.RECOVERING: frozenset({Phase.STARTING, Phase.DRAINING, Phase.REQUEUED}) | EARLY_ENDS,
    Phase.DRAINING: frozenset({Phase.REQUEUED, Phase.DONE}) | EARLY_ENDS,
    Phase.REQUEUED: frozenset({Phase.GATHERING}) | EARLY_ENDS,
    Phase.DONE: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.CANCELLED: frozenset(),
}


class NodeHealth(StrEnum):
    """What is known of a node."""

    FIT = "FIT"
    SUSPECT = "SUSPECT"  # silent or accused; probes are under way (never journaled: it proves nothing)
    DEGRADED = "DEGRADED"  # works and keeps its ranks, but a precursor was seen
    UNFIT = "UNFIT"  # alive with a fatal hardware signal
    HUNG = "HUNG"  # its kernel answers, its processes don't
    LOST = "LOST"  # gone: power, kernel or network
    RETURNING = "RETURNING"  # was LOST or HUNG and is heard again; drained until an operator resumes it


OUT_OF_SERVICE = frozenset({NodeHealth.UNFIT, NodeHealth.HUNG, NodeHealth.LOST, NodeHealth.RETURNING})
UNRESPONSIVE = frozenset({NodeHealth.LOST, NodeHealth.HUNG})
"""Nothing comes from such a node; its streams may stay open on this side for a while."""
RESUMABLE = frozenset({NodeHealth.UNFIT, NodeHealth.RETURNING})
"""Who is fit again as soon as Slurm has the node in service: an operator has resumed it."""

NODE_TRANSITIONS: dict[NodeHealth, frozenset[NodeHealth]] = {
    NodeHealth.FIT: frozenset({NodeHealth.DEGRADED, NodeHealth.UNFIT, NodeHealth.HUNG, NodeHealth.LOST}),
    NodeHealth.SUSPECT: frozenset(),
    NodeHealth.DEGRADED: frozenset({NodeHealth.UNFIT, NodeHealth.HUNG, NodeHealth.LOST}),
    NodeHealth.UNFIT: frozenset({NodeHealth.FIT, NodeHealth.HUNG, NodeHealth.LOST}),
    NodeHealth.HUNG: frozenset({NodeHealth.RETURNING}),
    NodeHealth.LOST: frozenset({NodeHealth.RETURNING}),
    NodeHealth.RETURNING: frozenset({NodeHealth.FIT}),
}


class IllegalTransition(Exception):
    """A move that the table does not hold; the state is unchanged. Always a bug."""


def check_gang_transition(now: Phase, to: Phase) -> Phase:
    """`to`, if a gang may go there from `now`.

    Raises:
        IllegalTransition: the table has no such edge.
    """
    if to not in GANG_TRANSITIONS[now]:
        raise IllegalTransition(f"gang: {now} → {to}")
    return to


def check_node_transition(now: NodeHealth, to: NodeHealth) -> NodeHealth:
    """`to`, if a node may go there from `now`; staying is allowed.

    Raises:
        IllegalTransition: the table has no such edge.
    """
    if to != now and to not in NODE_TRANSITIONS[now]:
        raise IllegalTransition(f"node: {now} → {to}")
    return to
