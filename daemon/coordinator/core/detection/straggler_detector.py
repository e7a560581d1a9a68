"""The straggler detector: which rank a synchronous job waits for, although all ranks show the same step time.

Ranks report medians of compute and wait over blocks of 4 steps (`block_times`). Three blocks in a row are judged
together. A rank is slow if it computes longer than the median rank by a clear share, by more than ranks and blocks
differ anyway, and if the median rank waits that much longer than it does. Without the last condition nobody is held up.
If more than a quarter of the ranks are slow, the job is uneven, and nobody is a straggler. A rank that becomes 30 %
slower is named within 15 finished steps. It is a straggler until it has kept pace for ten blocks.

A straggler accuses no node. Uneven data, a log that only rank 0 writes, or a slow data loader make one as well, and all
of that is the job's. Of the jobs with stragglers in a published study, 1.7 % had them because of a bad machine. So the
gang records and shows a straggler, and the health of the node does not change. If it lasts, the policy's row
`straggler` may have the ranks leave the node (`planned_swap`). A rank that is slow on a second node, too, has taken its
slowness along: it is the job's, and no further node is left for it.
"""

import math
from collections.abc import Iterable, Mapping

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.block_times import BLOCKS_JUDGED, BlockTime, JudgedBlock, RankPaces, SlowRank
from muster.daemon.coordinator.core.state.durable_state import Gang
from muster.daemon.coordinator.core.state.limits import StragglerRule
from muster.daemon.coordinator.core.state.state_tables import Response
from muster.daemon.coordinator.core.state.turn import GangTurn

CALM_BLOCKS = 10
"""Blocks in a row in which a straggler must keep pace before it is none."""
LEAST_SHARE = 0.15
"""Share of the median compute time by which a slow rank is longer, at least: half of what a rank that is 30 % slower
shows, so that noise neither makes nor hides one."""
LEAST_US = 1000
"""Microseconds by which a slow rank is longer, at least: a process that is scheduled late is as late as that."""
NOISE_FACTOR = 5.0
"""How many standard deviations of such a mean a slow rank is off, at least. The deviation is measured, and step times
have long tails: 5 name nobody in runs of 2,000 steps whose times scatter by 15 %."""
DEVIATION_OF_MEDIAN = 1.4826
"""The standard deviation of normally distributed values, as a multiple of their median absolute deviation. The
differences of pairs of them have one that is longer by the square root of 2."""
DEVIATION_WEIGHT = 1 / 16
"""How much the newest block counts for the deviation: it is known from some 16 blocks (64 steps)."""
CALM_FACTOR = 0.5
"""The part of these thresholds under which a rank keeps pace again."""
MOST_PART = 0.25
"""The part of the ranks that may be off by more than the lower thresholds at the same time; one always may."""
TIMES_KEPT = 64
"""Newest times in which a rank was a straggler that are kept. A rank that comes and goes more often in a rule's window
does not last."""
WAIT_PART = 0.5
"""The part of the excess that the median rank must wait longer than the slow rank. Other waits blur it."""
STRAGGLERS_PER_GENERATION = 8
"""Stragglers that are recorded of one generation: a job that has more is uneven, and the journal is finite."""


def detect_stragglers(gang_turn: GangTurn) -> None:
    """Judge the blocks that are whole now. Record a rank that has become a straggler, and one that lasts."""
    gang, blocks = gang_turn.gang, gang_turn.observed.blocks
    if blocks.generation != gang.generation:
        return
    for block in blocks.take_whole(gang.ranks):
        follow(blocks.paces, block, gang_turn.now)
    for rank, slow in blocks.paces.slow_ranks.items():
        if slow.named:
            _record(gang_turn, rank, slow)


def follow(paces: RankPaces, times: Mapping[int, BlockTime], now: float) -> None:
    """Judge one more block: change what is known of the ranks."""
    paces.recent.append(_judged(times))
    _note_deviation(paces)
    if len(paces.recent) < BLOCKS_JUDGED:
        return
    slow, off = slow_in(paces), slow_in(paces, CALM_FACTOR)
    if len(off) > max(1, MOST_PART * len(times)):
        slow, off = set(), set()
    median_us = _mean(block.median_us for block in paces.recent)
    for rank in slow - paces.slow_ranks.keys():
        paces.slow_ranks[rank] = SlowRank()
    for rank, known in list(paces.slow_ranks.items()):
        if rank in slow:
            known.note_slow(_mean(block.times[rank].compute_us for block in paces.recent), median_us)
        known.calm_blocks = 0 if rank in off else known.calm_blocks + 1
        _name(known, rank in slow, now)


def slow_in(paces: RankPaces, factor: float = 1.0) -> set[int]:
    """The ranks that were slow in the recent blocks. `factor`: of the thresholds."""
    median_us = _mean(block.median_us for block in paces.recent)
    noise = NOISE_FACTOR * paces.deviation / math.sqrt(len(paces.recent))
    least = factor * max(LEAST_SHARE, noise, LEAST_US / max(median_us, 1))
    return {rank for rank in paces.recent[-1].excess if _is_slow(paces, rank, least)}


def _is_slow(paces: RankPaces, rank: int, least: float) -> bool:
    """In the mean of the recent blocks by `least` (a share), in each of them by half of it; and others wait for it."""
    excess = [block.excess[rank] for block in paces.recent]
    if _mean(excess) <= least or min(excess) <= least / 2:
        return False
    excess_us = _mean(block.times[rank].compute_us - block.median_us for block in paces.recent)
    waits_us = _mean(block.median_wait_us - block.times[rank].wait_us for block in paces.recent)
    return waits_us >= WAIT_PART * excess_us


def _judged(times: Mapping[int, BlockTime]) -> JudgedBlock:
    """With two ranks, the medians are those of the fast one."""
    median_us = _lower_median(time.compute_us for time in times.values())
    median_wait_us = _upper_median(time.wait_us for time in times.values())
    excess = {rank: (time.compute_us - median_us) / max(median_us, 1) for rank, time in times.items()}
    return JudgedBlock(times, median_us, median_wait_us, excess)


def _note_deviation(paces: RankPaces) -> None:
    """How much the ranks of the newest block differ, and each of them from the block before."""
    excess = paces.recent[-1].excess
    found = DEVIATION_OF_MEDIAN * _lower_median(abs(share) for share in excess.values())
    if len(paces.recent) > 1:
        before = paces.recent[-2].excess
        changes = (abs(share - before[rank]) for rank, share in excess.items())
        found = max(found, DEVIATION_OF_MEDIAN / math.sqrt(2) * _upper_median(changes))
    paces.deviation += DEVIATION_WEIGHT * (found - paces.deviation)


def _name(known: SlowRank, slow: bool, now: float) -> None:
    """Begin, prolong or end the time in which the rank is a straggler."""
    if known.named:
        known.named_times[-1] = (known.named_times[-1][0], now)
        known.named = known.calm_blocks < CALM_BLOCKS
    elif slow:
        known.named = True
        known.named_times = [*known.named_times[1 - TIMES_KEPT :], (now, now)]


def lasts(slow: SlowRank, rule: StragglerRule, now: float) -> bool:
    """The rank was a straggler for the rule's share of its window."""
    begin = now - rule.window_s
    named_s = sum(max(0.0, end - max(since, begin)) for since, end in slow.named_times)
    return named_s >= rule.share * rule.window_s


def _record(gang_turn: GangTurn, rank: int, slow: SlowRank) -> None:
    """Record the straggler once, and once more when it lasts."""
    gang, rule = gang_turn.gang, gang_turn.turn.limits.straggler
    known = [straggler for straggler in gang.stragglers if straggler.generation == gang.generation]
    mine = next((straggler for straggler in known if straggler.rank == rank), None)
    if mine is None and len(known) < STRAGGLERS_PER_GENERATION:
        _record_straggler(gang_turn, rank, slow, None)
    elif mine is not None and mine.response is None and rule is not None and lasts(slow, rule, gang_turn.now):
        _record_straggler(gang_turn, rank, slow, rule)


def _record_straggler(gang_turn: GangTurn, rank: int, slow: SlowRank, rule: StragglerRule | None) -> None:
    gang = gang_turn.gang
    node = next((seat.node for seat in gang.seats if seat.group_rank == rank // gang.spec.ranks_per_node), "")
    if not node:
        return
    reason = (
        f"rank {rank} on {node} computes {slow.slower_by:.0%} longer than the median rank in each step "
        f"({slow.compute_us / 1000:.1f} ms instead of {slow.median_us / 1000:.1f} ms), and the others wait for it"
    )
    response = None
    if rule is not None:
        elsewhere = _slow_before_on(gang, rank, node)
        reason += f", for {rule.share:.0%} of {rule.window_s:g} s"
        reason += f"; it was slow on {elsewhere}, too, so the cause is in the job" if elsewhere else ""
        response = Response.RECORD if elsewhere else rule.response
    gang_turn.turn.record(facts.StragglerDetected(gang.id, gang.generation, rank, node, reason, response))


def _slow_before_on(gang: Gang, rank: int, node: str) -> str:
    """Another node on which the same rank was a straggler that lasted; empty if there is none."""
    before = (straggler for straggler in gang.stragglers if straggler.rank == rank and straggler.response is not None)
    return next((straggler.node for straggler in before if straggler.node != node), "")


def _lower_median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _upper_median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _mean(values: Iterable[float]) -> float:
    counted = list(values)
    return sum(counted) / len(counted)
