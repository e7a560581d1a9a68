"""The two state machines, as literal tables.

A gang moves SUBMITTED → GATHERING → PREFLIGHT → STARTING → RUNNING; every fault leads through RECOVERING back to
STARTING, or through DRAINING to a requeue or an end. A node is FIT until evidence says otherwise.
A move that the table does not hold is a bug: `move_gang` and `move_node` raise IllegalMove, and nothing has changed.
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
WATCHED = ACTIVE | {Phase.DRAINING}
"""Who falls silent is asked after: it carries a rank, or holds a part of the last checkpoint."""
CUT_SHORT = frozenset({Phase.FAILED, Phase.CANCELLED})
"""Ends that may come at any moment."""

GANG_MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.SUBMITTED: frozenset({Phase.GATHERING}) | CUT_SHORT,
    Phase.GATHERING: frozenset({Phase.PREFLIGHT, Phase.REQUEUED}) | CUT_SHORT,
    Phase.PREFLIGHT: frozenset({Phase.STARTING, Phase.REQUEUED}) | CUT_SHORT,
    Phase.STARTING: frozenset({Phase.RUNNING, Phase.RECOVERING, Phase.REQUEUED}) | CUT_SHORT,
    Phase.RUNNING: frozenset({Phase.RECOVERING, Phase.DRAINING, Phase.REQUEUED, Phase.DONE}) | CUT_SHORT,
    Phase.RECOVERING: frozenset({Phase.STARTING, Phase.DRAINING, Phase.REQUEUED}) | CUT_SHORT,
    Phase.DRAINING: frozenset({Phase.REQUEUED, Phase.DONE}) | CUT_SHORT,
    Phase.REQUEUED: frozenset({Phase.GATHERING}) | CUT_SHORT,
    Phase.DONE: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.CANCELLED: frozenset(),
}


class Verdict(StrEnum):
    """What is known of a node."""

    FIT = "FIT"
    SUSPECT = "SUSPECT"  # silent or accused; probes are under way (never journaled: it proves nothing)
    DEGRADED = "DEGRADED"  # works and keeps its ranks, but a precursor was seen
    UNFIT = "UNFIT"  # alive with a fatal hardware signal
    HUNG = "HUNG"  # its kernel answers, its processes don't
    LOST = "LOST"  # gone: power, kernel or network
    RETURNING = "RETURNING"  # was LOST or HUNG and is heard again; drained until an operator resumes it


OUT_OF_SERVICE = frozenset({Verdict.UNFIT, Verdict.HUNG, Verdict.LOST, Verdict.RETURNING})
SILENT = frozenset({Verdict.LOST, Verdict.HUNG})
"""Nothing comes from such a node; its streams may stay open on this side for a while."""
RESUMABLE = frozenset({Verdict.UNFIT, Verdict.RETURNING})
"""Who is fit again as soon as Slurm has the node in service: an operator has resumed it."""

NODE_MOVES: dict[Verdict, frozenset[Verdict]] = {
    Verdict.FIT: frozenset({Verdict.DEGRADED, Verdict.UNFIT, Verdict.HUNG, Verdict.LOST}),
    Verdict.SUSPECT: frozenset(),
    Verdict.DEGRADED: frozenset({Verdict.UNFIT, Verdict.HUNG, Verdict.LOST}),
    Verdict.UNFIT: frozenset({Verdict.FIT, Verdict.HUNG, Verdict.LOST}),
    Verdict.HUNG: frozenset({Verdict.RETURNING}),
    Verdict.LOST: frozenset({Verdict.RETURNING}),
    Verdict.RETURNING: frozenset({Verdict.FIT}),
}


class IllegalMove(Exception):
    """A move that the table does not hold; the state is unchanged. Always a bug."""


def move_gang(now: Phase, to: Phase) -> Phase:
    """`to`, if a gang may go there from `now`.

    Raises:
        IllegalMove: the table has no such edge.
    """
    if to not in GANG_MOVES[now]:
        raise IllegalMove(f"gang: {now} → {to}")
    return to


def move_node(now: Verdict, to: Verdict) -> Verdict:
    """`to`, if a node may go there from `now`; staying is allowed.

    Raises:
        IllegalMove: the table has no such edge.
    """
    if to != now and to not in NODE_MOVES[now]:
        raise IllegalMove(f"node: {now} → {to}")
    return to
