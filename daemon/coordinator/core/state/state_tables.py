"""The state machine of gangs as a literal table. That of nodes is `muster.node_health.HEALTHS`.

A gang goes SUBMITTED → GATHERING → PREFLIGHT → STARTING → RUNNING. Every fault leads through RECOVERING back to
STARTING, or through DRAINING to a requeue or an end. A node is FIT until evidence says otherwise.

A transition that its table does not hold is a bug: `check_gang_transition` and `check_node_transition` raise
IllegalTransition, and nothing has changed.
"""

from enum import StrEnum

from muster.node_health import NODE_TRANSITIONS, NodeHealth


class Phase(StrEnum):
    """The phase of a gang."""

    SUBMITTED = "SUBMITTED"  # registered; Slurm has not started the job, or its script has launched nothing yet
    GATHERING = "GATHERING"  # Slurm has started the job; its agents attach
    PREFLIGHT = "PREFLIGHT"  # enough agents are attached; the first rendezvous store opens
    STARTING = "STARTING"  # the agents have the order to run a generation
    RUNNING = "RUNNING"  # every rank runs
    RECOVERING = "RECOVERING"  # fence the ranks, place them, restore their state
    DRAINING = "DRAINING"  # the ranks have ended; the last checkpoint is written to durable storage
    REQUEUED = "REQUEUED"  # the job is back in the queue of Slurm
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


FINAL = frozenset({Phase.DONE, Phase.FAILED, Phase.CANCELLED})
FENCING = frozenset({Phase.PREFLIGHT, Phase.RECOVERING})
"""All ranks must end, and the rendezvous store of the next generation opens."""
ACTIVE = FENCING | {Phase.STARTING, Phase.RUNNING}
"""Ranks run, or will run: every agent must be in touch."""
MONITORED = ACTIVE | {Phase.DRAINING}
"""A silent member is probed: it carries a rank, or holds a part of the last checkpoint."""
EARLY_ENDS = frozenset({Phase.FAILED, Phase.CANCELLED})
"""Ends that are possible in every phase."""

GANG_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.SUBMITTED: frozenset({Phase.GATHERING, Phase.DONE}) | EARLY_ENDS,
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


class Response(StrEnum):
    """What follows when a node becomes DEGRADED. Each response includes those before it."""

    RECORD = "record"  # the node is shown as DEGRADED
    FLUSH = "flush"  # the memory checkpoint of the gangs that train on the node is written to durable storage
    SWAP = "swap"  # a planned swap moves the ranks to a spare, and the node is drained

    @property
    def strength(self) -> int:
        """The place in the order of responses."""
        return list(Response).index(self)


class IllegalTransition(Exception):
    """The table does not hold this transition; the state is unchanged. Always a bug of Muster."""


def check_gang_transition(now: Phase, to: Phase) -> Phase:
    """Return `to` if a gang may go there from `now`.

    Raises:
        IllegalTransition: the table has no such edge.
    """
    if to not in GANG_TRANSITIONS[now]:
        raise IllegalTransition(f"gang: {now} → {to}")
    return to


def check_node_transition(now: NodeHealth, to: NodeHealth) -> NodeHealth:
    """Return `to` if a node may go there from `now`. It may also stay.

    Raises:
        IllegalTransition: the table has no such edge.
    """
    if to != now and to not in NODE_TRANSITIONS[now]:
        raise IllegalTransition(f"node: {now} → {to}")
    return to
