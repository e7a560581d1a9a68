"""The straggler detector: which rank a synchronous job waits for, although all ranks show the same step time.

Ranks report medians of compute and wait over blocks of 4 steps (`block_times`). `straggler_evidence` adds them up and
names the ranks that are slow. Here they become findings: one for each node, because what slows several ranks of one
node is most likely one thing.

A straggler accuses no node. Uneven data, a log that only rank 0 writes, or a slow data loader make one as well, and all
of that is the job's. Of the jobs with stragglers in a published study, 1.7 % had them because of a bad machine. So the
gang records and shows a straggler, and the health of the node does not change. If it lasts, the policy's row
`straggler` may have the ranks leave the node (`planned_swap`). Ranks that are slow on a second node, too, have taken
their slowness along: it is the job's, and no further node is left for them.
"""

from collections.abc import Mapping

from muster.daemon.coordinator.core.detection.straggler_evidence import follow
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.block_times import RankPace
from muster.daemon.coordinator.core.state.generations import Findings
from muster.daemon.coordinator.core.state.limits import StragglerRule
from muster.daemon.coordinator.core.state.state_tables import Response
from muster.daemon.coordinator.core.turn.turn import GangTurn

FINDINGS_PER_GENERATION = 8
"""Nodes with stragglers that are recorded of a generation: a job that has more is uneven, and the journal is finite."""


def detect_stragglers(gang_turn: GangTurn) -> None:
    """Judge the blocks that are whole now. Record each node whose ranks are stragglers, and again when they last."""
    gang, blocks = gang_turn.gang, gang_turn.observed.blocks
    if blocks.generation != gang.newest.generation:
        return
    for block in blocks.take_whole(gang.ranks):
        follow(blocks.paces, block, gang.spec.ranks_per_node, gang_turn.now)
    by_seat: dict[int, dict[int, RankPace]] = {}
    for rank, pace in blocks.paces.stragglers.items():
        by_seat.setdefault(rank // gang.spec.ranks_per_node, {})[rank] = pace
    for seat, stragglers in by_seat.items():
        _record(gang_turn, seat, stragglers)


def lasts(pace: RankPace, rule: StragglerRule, now: float) -> bool:
    """The rank was a straggler for the rule's share of its window."""
    begin = now - rule.window_s
    named_s = sum(max(0.0, end - max(since, begin)) for since, end in pace.named_times)
    return named_s >= rule.share * rule.window_s


def _record(gang_turn: GangTurn, group_rank: int, stragglers: Mapping[int, RankPace]) -> None:
    """Record the stragglers of one seat once, and once more when one of them lasts."""
    gang, rule = gang_turn.gang, gang_turn.turn.limits.straggler
    known = [straggler for straggler in gang.findings.stragglers if straggler.generation == gang.newest.generation]
    mine = next((one for one in known if one.rank // gang.spec.ranks_per_node == group_rank), None)
    if mine is None and len(known) < FINDINGS_PER_GENERATION:
        _record_stragglers(gang_turn, group_rank, stragglers, None)
    elif mine is not None and mine.response is None and rule is not None:
        lasting = {rank: pace for rank, pace in stragglers.items() if lasts(pace, rule, gang_turn.now)}
        if lasting:
            _record_stragglers(gang_turn, group_rank, lasting, rule)


def _record_stragglers(
    gang_turn: GangTurn, group_rank: int, stragglers: Mapping[int, RankPace], rule: StragglerRule | None
) -> None:
    gang = gang_turn.gang
    node = next((seat.node for seat in gang.roster.seats if seat.group_rank == group_rank), "")
    if not node:
        return
    per_node = gang.spec.ranks_per_node
    reason = _reason(stragglers, per_node, node)
    response = None
    if rule is not None:
        ranks = range(group_rank * per_node, (group_rank + 1) * per_node)
        elsewhere = _slow_before_on(gang.findings, ranks, node)
        reason += f", for {rule.share:.0%} of {rule.window_s:g} s"
        who = "it was" if len(stragglers) == 1 else "they were"
        reason += f"; {who} slow on {elsewhere}, too, so the cause is in the job" if elsewhere else ""
        response = Response.RECORD if elsewhere else rule.response
    gang_turn.turn.record(
        facts.StragglerDetected(gang.id, gang.newest.generation, min(stragglers), node, reason, response)
    )


def _reason(stragglers: Mapping[int, RankPace], ranks_per_node: int, node: str) -> str:
    rank, slowest = max(stragglers.items(), key=lambda item: item[1].slower_by)
    if len(stragglers) > 1:
        listed = ", ".join(map(str, sorted(stragglers)))
        who = f"{node} is slow: {len(stragglers)} of its {ranks_per_node} ranks ({listed}) compute up to"
    else:
        who = f"rank {rank} on {node} computes"
    return (
        f"{who} {slowest.slower_by:.0%} longer than the median rank in each step "
        f"({slowest.compute_us / 1000:.1f} ms instead of {slowest.usual_us / 1000:.1f} ms), and the others wait for it"
    )


def _slow_before_on(findings: Findings, ranks: range, node: str) -> str:
    """Another node on which one of `ranks`, those of a seat, was a straggler that lasted; empty if there is none."""
    before = (one for one in findings.stragglers if one.response is not None and one.rank in ranks)
    return next((one.node for one in before if one.node != node), "")
