"""Planned growth: ranks are put on nodes that have come while the gang trained, at the end of a step.

1. A gang trains with fewer nodes than its job has asked for, and spares are ready: `plan` records GrowthPlanned.
   Or it is whole, has ranks on a node of the shared pool, and a spare of its own is ready: the node of the pool gives
   way (SwapPlanned), and its pool job is ended as that of any member that is left.
2. The ranks finish a step, keep it and exit, as for a planned swap. No step is repeated.
3. `grown_seats` gives the seats of the next generation. All ranks that there were keep their number and their node, so
   each finds its state in its own memory. A new rank starts from the state that the replicas share.

Nobody is blamed, and nothing is held against a node. Two such restarts are minutes apart, so that a node which comes
and goes does not stop the training each time. A recovery that interrupts the growth goes on as if there was none: the
growth is planned anew later. Where ranks crash after a growth, it is undone (`growth.undone_growth`).
"""

from collections.abc import Sequence
from dataclasses import replace

from muster.daemon.coordinator.core.detection import fencing
from muster.daemon.coordinator.core.recovery import planned_swap, wanted_nodes
from muster.daemon.coordinator.core.recovery.growth import surplus_nodes
from muster.daemon.coordinator.core.recovery.growth.undone_growth import GIVES_WAY, GROWTH, next_at
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import GangSpec
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.generations import Swap
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.communication import wider_than_asked
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.fabric.model.fabric import Fabric

TOGETHER_S = 30.0
"""Seconds that a first node waits for others that are lacking, too: nodes are often repaired together."""
REQUESTED_S = 120.0
"""Seconds that a first node waits for those that were requested. The site may let a request stand in Slurm's queue for
an hour, and the next one follows it."""
WARM_UP_S = 60.0
"""Seconds that the imports of a spare may take. A job whose ranks are no Python reports none."""
LOOK_INTERVAL_S = 1.0
"""Seconds between two looks at a gang that lacks nodes: its agents report more often, and each look is at all nodes."""


def request_and_plan_growth(gang_turn: GangTurn) -> None:
    """Request the nodes that the gang lacks, and plan what those allow that have come."""
    gang, seen = gang_turn.gang, gang_turn.observed
    if gang.phase is not Phase.RUNNING or not wanted_nodes.lacks_nodes(gang, len(gang_turn.index.present)):
        return
    look_at = seen.growth_looked_at + LOOK_INTERVAL_S
    if gang_turn.turn.changed_node is not None and gang_turn.now < look_at:
        gang_turn.turn.tick_at(look_at)
        return
    seen.growth_looked_at = gang_turn.now
    wanted_nodes.request(gang_turn)
    surplus_nodes.give_back(gang_turn, bool(gang.growth.pool) and planned_swap.waits_for_spare(gang_turn))
    _plan(gang_turn)


def _plan(gang_turn: GangTurn) -> None:
    gang = gang_turn.gang
    if not wanted_nodes.may_change(gang_turn) or not planned_swap.may_plan(gang_turn):
        return
    if gang.checkpoint.is_flushing:
        return  # it holds a slot of each rank, so that the step after which the ranks stop may not be kept
    if gang_turn.now < (grows_at := next_at(gang.growth, gang.recovery)):
        gang_turn.turn.tick_at(grows_at)
        return
    if _spares_warm_up(gang_turn):
        return
    if len(gang.roster.seats) < gang.spec.nodes:
        _plan_growth(gang_turn)
    elif (pool := _seated_of_pool(gang)) and (own := own_spares(gang_turn)):
        words = f"{pool[0]} of the shared pool gives way to {own[0]}, which is back"
        gang_turn.turn.record(
            facts.SwapPlanned(gang.id, pool[0], gang.newest.generation, words, gives_way_to=own[0]),
        )


def _spares_warm_up(gang_turn: GangTurn) -> bool:
    """A spare that has just come still imports what its ranks need. Training goes on meanwhile: the ranks stop for a
    second then, and not for as long as the imports take."""
    seen, ranks, now = gang_turn.observed, gang_turn.gang.spec.ranks_per_node, gang_turn.now
    cold = [node for node in _ready(gang_turn) if seen.status(node).warm < ranks]
    until = [at for node in cold if (at := seen.agents[node].attached_at + WARM_UP_S) > now]
    if until:
        gang_turn.turn.tick_at(min(until))
    return bool(until)


def _plan_growth(gang_turn: GangTurn) -> None:
    gang = gang_turn.gang
    before = [seat.node for seat in gang.roster.seats]
    after = _grown(gang_turn, before, gang.spec.nodes)
    if len(after) <= len(before) or not _is_allowed(gang.spec, gang_turn.fabric, before, after):
        return
    if len(after) < gang.spec.nodes and _more_may_come(gang_turn, after[len(before) :]):
        return
    ranks = gang.spec.ranks_per_node
    words = f"grows from {len(before) * ranks} to {len(after) * ranks} ranks with {', '.join(after[len(before) :])}"
    gang_turn.turn.record(facts.GrowthPlanned(gang.id, gang.newest.generation, len(after), words))


def _more_may_come(gang_turn: GangTurn, further: Sequence[str]) -> bool:
    """One restart shall do for all nodes that come within TOGETHER_S, and for those that were requested and come within
    REQUESTED_S."""
    came_at = (gang_turn.observed.agents[node].attached_at for node in further)
    are_requested = any(one.until and not one.node for one in gang_turn.gang.growth.pool.values())
    until = min(came_at) + (REQUESTED_S if are_requested else TOGETHER_S)
    if gang_turn.now < until:
        gang_turn.turn.tick_at(until)
    return gang_turn.now < until


def fence_stopped(gang_turn: GangTurn) -> None:
    """Every rank has stopped for a planned growth: end the generation."""
    swap = gang_turn.gang.plans.swap
    assert swap is not None
    before = [seat.node for seat in gang_turn.gang.roster.seats]
    kept = "" if len(_grown(gang_turn, before, swap.nodes)) > len(before) else ", but no spare is left for that"
    words = f"{_words_of(swap)}, after step {gang_turn.observed.step_number}{kept}"
    fencing.fence_generation(gang_turn, words, hardware=True, suspected_at=gang_turn.now)


def grown_seats(gang_turn: GangTurn, seats: list[str]) -> list[str]:
    """The seats of the next generation, which would be `seats` without a growth: more of them if the generation before
    was ended for that and for nothing else."""
    swap, recovery = gang_turn.gang.plans.swap, gang_turn.gang.recovery.last
    if swap is None or not swap.nodes or recovery is None or recovery.nodes_out:
        return seats
    if not recovery.cause.startswith(_words_of(swap)):
        return seats  # a rank has crashed, or the ranks hang
    return _grown(gang_turn, seats, swap.nodes)


def _words_of(swap: Swap) -> str:
    return f"the gang {swap.reason}"


def seated_last(gang: Gang) -> dict[str, int]:
    """Nodes of the shared pool that carry no rank: a spare of the job's own takes a seat before them."""
    return dict.fromkeys((member.node for member in gang.pool_members()), 1) if gang.growth.pool else {}


def action(swap: Swap | None, before: Sequence[str], after: Sequence[str]) -> str:
    """What a planned change of the nodes is called."""
    if len(after) > len(before):
        return GROWTH
    return GIVES_WAY if swap is not None and swap.gives_way_to in set(after).difference(before) else ""


def own_spares(gang_turn: GangTurn) -> list[str]:
    """Ready spares that are no nodes of the shared pool, along the tree, besides those that empty seats need."""
    gang, ready = gang_turn.gang, _ready(gang_turn)
    own = [node for node in ready if not gang.is_of_pool(gang.roster.members[node])]
    return own[: max(0, planned_swap.free_spares(gang_turn))]


def _seated_of_pool(gang: Gang) -> list[str]:
    return [seat.node for seat in gang.roster.seats if gang.is_of_pool(gang.roster.members[seat.node])]


def _ready(gang_turn: GangTurn) -> list[str]:
    """Spares that can take a seat at once and whose node check, if the job wants one, has found nothing; along the
    tree, those of the shared pool last."""
    gang, index = gang_turn.gang, gang_turn.index
    ready = set(planned_swap.ready_spares(gang_turn)) - index.check_pending - index.check_failed
    order = gang_turn.fabric.order
    return sorted(ready, key=lambda node: (gang.is_of_pool(gang.roster.members[node]), order[node]))


def _grown(gang_turn: GangTurn, seats: list[str], most: int) -> list[str]:
    """`seats`, and further ones for spares that are ready, `most` in all; as many as hold whole replicas."""
    free = max(0, planned_swap.free_spares(gang_turn))
    further = [node for node in _ready(gang_turn) if node not in seats][:free]
    after = [*seats, *further][: max(most, len(seats))]
    while len(after) > len(seats) and not _holds_whole_replicas(gang_turn.gang.spec, len(after)):
        after.pop()
    return after


def _holds_whole_replicas(spec: GangSpec, nodes: int) -> bool:
    return nodes * spec.ranks_per_node % (spec.tensor * spec.context * spec.pipeline) == 0


def _is_allowed(spec: GangSpec, fabric: Fabric, before: Sequence[str], after: Sequence[str]) -> bool:
    """No group that must be packed lies wider than it does now."""
    required = replace(
        spec, traffic=tuple(one if one.required else replace(one, packed_in="any") for one in spec.traffic)
    )
    return not wider_than_asked(required, list(after), fabric) or bool(wider_than_asked(required, list(before), fabric))
