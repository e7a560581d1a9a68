"""Node checks: what the agents of a gang have found about their nodes before ranks start there.

The result comes from a process of the job's owner. So it counts for this gang only: the node's health does not change,
and Slurm drains nothing. Each agent checks once in its life.

All checks are asked for before one of them counts: if most nodes have failed, they share a cause in the software, and
all stay. One result is recorded in the life of an agent, because the job's owner could report others without end.
"""

from collections import defaultdict
from statistics import median

from muster.daemon.coordinator.core.detection import fencing
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import CheckOutcome, NodeCheck
from muster.daemon.coordinator.core.state.roster import Member, Roster
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.gang_index import GangIndex
from muster.daemon.coordinator.core.turn.turn import GangTurn

ALL_CHECKS_WAIT_S = 20.0
"""Seconds that the first start waits for the checks of all nodes. Seats follow the network fabric, so the order in
which checks end must not choose them. On like nodes the checks end within seconds of each other."""
CHECK_WAIT_S = 75.0
"""Seconds that the first start waits at most while too few nodes have passed. An agent gives up its check after 60 s,
later only if other processes kept the check from a core."""
SLOW_SHARE = 0.7
"""The share of the median rate below which a node is slow. It is chosen, not measured."""
FEWEST_COMPARED = 3
"""Nodes with the same hardware that a median needs."""


def record_results(gang_turn: GangTurn) -> None:
    """Record each check that has ended."""
    gang = gang_turn.gang
    for node in sorted(gang_turn.index.check_ended):
        if check := gang_turn.observed.status(node).node_check:
            gang_turn.turn.record(facts.NodeChecked(gang.id, node, gang.roster.members[node].job, check))


def leave_out_failed(gang_turn: GangTurn) -> None:
    """Remove the members whose check has failed and that carry no ranks, so that another node takes the seat.

    If most checks have failed, the nodes share the cause, for example a broken PyTorch: all of them stay. During a
    recovery nobody leaves: the removal of a spare would count as the cause of the recovery.
    """
    gang, index = gang_turn.gang, gang_turn.index
    if not index.check_failed or gang.phase is Phase.RECOVERING or gang_turn.turn.limits.observe:
        return
    if _may_end_soon(index, gang.phase_at, gang_turn.now):
        return
    for member in _left_out(gang.roster, index):
        found = member.check.reason or member.check.outcome if member.check else ""
        words = f"{member.node} has failed its node check: {found}"
        fencing.remove_member(gang_turn, member, words, alive=True)


def _left_out(roster: Roster, index: GangIndex) -> list[Member]:
    """The members that have failed and carry no ranks, by name; none if most members have failed."""
    failed = sum(member.failed_check for member in roster.members.values())
    if 2 * failed > len(roster.members):
        return []
    return [roster.members[node] for node in sorted(index.check_failed - {seat.node for seat in roster.seats})]


def are_awaited(gang_turn: GangTurn) -> bool:
    """Before the first start, checks still run, and more nodes may pass. A swap waits for no check."""
    gang, index = gang_turn.gang, gang_turn.index
    if gang.phase is not Phase.PREFLIGHT or not _may_end_soon(index, gang.phase_at, gang_turn.now):
        return False
    reluctant = last_choices(gang_turn)
    enough = sum(member.node not in reluctant for member in gang_turn.usable()) >= gang.spec.nodes
    until = gang.phase_at + (ALL_CHECKS_WAIT_S if enough else CHECK_WAIT_S)
    if gang_turn.now >= until:
        return False
    gang_turn.turn.tick_at(until)
    return True


def last_choices(gang_turn: GangTurn) -> dict[str, int]:
    """Nodes that get a seat only if no other node is left, those with a higher number last: DEGRADED, drained
    and slow nodes, nodes that are not checked yet, nodes that have failed."""
    members, index = gang_turn.gang.roster.present(), gang_turn.index
    slow = {member.node for member in members if _is_slow(member.check)} | _slower_than_others(members)
    return {
        **dict.fromkeys(gang_turn.turn.index.unwanted | slow, 1),
        **dict.fromkeys(index.check_pending, 2),
        **dict.fromkeys(index.check_failed, 3),
    }


def _may_end_soon(index: GangIndex, phase_at: float, now: float) -> bool:
    """Checks run that still have time."""
    return bool(index.check_pending) and now < phase_at + CHECK_WAIT_S


def _is_slow(check: NodeCheck | None) -> bool:
    return check is not None and check.outcome is CheckOutcome.SLOW


def _slower_than_others(members: list[Member]) -> set[str]:
    """Nodes with a rate far below the median of the gang's nodes with the same hardware. Shared cores say nothing."""
    alike: dict[str, list[tuple[str, NodeCheck]]] = defaultdict(list)
    for member in members:
        if member.check is not None and member.check.gflops and not member.check.cores_shared:
            alike[member.check.hardware].append((member.node, member.check))
    slow = set[str]()
    for nodes in alike.values():
        if len(nodes) >= FEWEST_COMPARED:
            usual = [median(rates) for rates in zip(*(_rates(check) for _, check in nodes), strict=True)]
            slow |= {node for node, check in nodes if _is_below(_rates(check), usual)}
    return slow


def _rates(check: NodeCheck) -> tuple[float, ...]:
    return check.gflops, check.memory_gb_s, check.host_to_device_gb_s


def _is_below(rates: tuple[float, ...], usual: list[float]) -> bool:
    return any(rate < SLOW_SHARE * median_rate for rate, median_rate in zip(rates, usual, strict=True))
