"""Swaps that users request: the owner of a job, or an operator, wants a spare to take the place of a node.

A request is carried out at once, or refused with the reason: nothing waits for a spare that may come. It says nothing
against the node: the node keeps its health, is not drained, and does not count against the circuit breaker's limits.
What a request adds to the journal counts as for every request (`circuit_breaker.why_no_request`).
"""

from dataclasses import dataclass

from muster.daemon.coordinator.core.detection import circuit_breaker
from muster.daemon.coordinator.core.recovery import planned_swap
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import Node
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.node_health import NodeHealth


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is refused, and what would be right. `for_good`: no later moment changes that."""

    words: str
    for_good: bool = False


def plan(gang_turn: GangTurn, request: events.SwapRequested) -> None:
    """Plan the swap that a user requests. A request that can't be carried out is dropped: the API has told the user."""
    gang, turn = gang_turn.gang, gang_turn.turn
    beyond_limits = circuit_breaker.why_no_request(turn.state, gang.account, turn.limits, turn.now)
    if not beyond_limits and why_not(gang_turn, request.node) is None:
        reason = requested_words(request.by, request.reason)
        turn.record(facts.SwapPlanned(gang.id, request.node, gang.newest.generation, reason, request.by))


def requested_words(by: str, reason: str) -> str:
    """Who asked, and why, in words."""
    return f"asked for by {by}" + (f": {reason}" if reason else "")


def why_not(gang_turn: GangTurn, node: str) -> Refusal | None:
    """Why no spare can take the place of `node` now; None: one can."""
    if words := _why_not_that_node(gang_turn.gang, node):
        return Refusal(words, for_good=True)
    words = _why_not_that_gang(gang_turn) or _why_no_spare(gang_turn, node)
    return Refusal(words) if words else None


def _why_not_that_node(gang: Gang, node: str) -> str:
    if gang.final:
        return f"the job is over: it is {gang.phase}"
    member, seated = gang.roster.members.get(node), [seat.node for seat in gang.roster.seats]
    right = f"name one of the nodes that carry its ranks: {' '.join(seated) or 'none does yet'}"
    if member is None:
        return f"{node} is no node of job {gang.slurm.job}; {right}"
    if member.removed:
        return f"{node} has left job {gang.slurm.job} already ({member.removal_reason})"
    return "" if node in seated else f"{node} carries no rank: it is a spare; {right}"


def _why_not_that_gang(gang_turn: GangTurn) -> str:
    """Why no node of the gang can be left now."""
    gang, swap = gang_turn.gang, gang_turn.gang.plans.swap
    if gang_turn.turn.limits.observe:
        return "the site has Muster in observe mode, in which no node is swapped"
    if swap is not None and swap.nodes:
        return f"the gang {swap.reason}; try again when that is over"
    if swap is not None:
        return f"a swap is under way: {swap.node} is left ({swap.reason}); try again when it is over"
    if gang.plans.stop is not None:
        return f"the ranks are stopping already: {gang.plans.stop.reason}"
    if gang.phase is not Phase.RUNNING:
        return f"the gang is {gang.phase}: a node can be swapped while the gang is RUNNING"
    if gang.findings.hang is not None:
        return f"the gang hangs, and is restarted: {gang.findings.hang.reason}"
    if not gang.newest.has_finished_step:
        return f"generation {gang.newest.generation} has finished no step yet: try again after its first step"
    if not planned_swap.may_plan(gang_turn):
        return f"no step of generation {gang.newest.generation} is whole in memory yet: try again after the next commit"
    return ""


def _why_no_spare(gang_turn: GangTurn, node: str) -> str:
    """Why no spare can take the place of `node`: without one, the job would have fewer nodes."""
    if planned_swap.free_spares(gang_turn) > 0:
        return ""
    seated = {seat.node for seat in gang_turn.gang.roster.seats}
    state, members = gang_turn.turn.state, gang_turn.gang.roster.present()
    spares = [state.node(member.node) for member in members if member.node not in seated]
    if not spares:
        return (
            f"the job has no spare that could take the place of {node}: submit it with `spares`, or with `pool_nodes`"
        )
    shown = ", ".join(f"{spare.name} ({_state_of_spare(gang_turn, spare)})" for spare in spares)
    return f"no spare is ready to take the place of {node}: {shown}; try again when `muster status` shows a fit spare"


def _state_of_spare(gang_turn: GangTurn, node: Node) -> str:
    seen, in_slurm = gang_turn.observed, gang_turn.turn.observed.node(node.name).drain
    if node.health is not NodeHealth.FIT:
        return f"{node.health}: {node.reason}"
    if node.drain is not None:
        return planned_swap.drain_words(node.name, node.drain)
    if in_slurm is not None:
        return f"drained in Slurm: {in_slurm.reason}" if in_slurm.reason else "drained in Slurm"
    if failure := seen.status(node.name).failure:
        return failure
    silent = node.name in seen.suspected_since or not seen.is_attached(node.name)
    return "silent" if silent else "needed for an empty seat"
