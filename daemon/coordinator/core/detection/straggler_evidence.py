"""The evidence that a rank is slow, which adds up over the blocks of its step times.

One block proves nothing where step times scatter, and many together do. So each rank has a sum (CUSUM: E. S. Page,
"Continuous inspection schemes", Biometrika 41, 1954). Each block adds the logarithm of a likelihood ratio (A. Wald,
"Sequential Analysis", 1947): how much likelier the block is if the rank is slow than if it keeps pace. The sum is never
below 0, so a long time without trouble hides nothing that comes later. In a calm gang a sum of 1 names a rank.

- What is judged is the excess: the logarithm of the rank's compute time over the median of the ranks on other nodes. So
  drift that all ranks share cancels out, and ranks of one node that are slow together do not hide each other.
- The noise is measured: how much the excess of the median rank changes from block to block, in the median of the newest
  64 blocks. Heavy tails and single slow ranks do not move a median.
- The influence of a block is bounded (P. J. Huber, "A robust version of the probability ratio test", 1965). So no tail,
  however heavy, makes a straggler, and a rank must be slow for 18 blocks (72 steps) at least.
- Nodes that are slow in turn, for some tens of steps each, are no stragglers. Their evidence comes and goes. So the
  mean evidence of a long time, the unrest of the gang, raises what is needed. More than a quarter of suspects,
  on several nodes, lets nobody be named.
- A gang is steady while no rank was slow for a while and then kept pace. After 512 blocks of that, 5 with evidence are
  enough. So the first node that is slow in turn may be named there, and then the gang is steady no longer.
- The same sum ends it: a straggler is none once the sum is back at 0.

Compute time alone shows only that a rank works longer. A straggler holds the others up, so they must have waited, too.
With two ranks the medians are those of the other one, and the slow one is the one that waits less.

Rejected: several blocks in a row over a threshold of five deviations. Where step times scatter by 30 %, a rank that is
30 % slower never reaches it. Also rejected: a model of the tails, because every cluster has others; means over several
blocks before the sum, and the largest evidence in place of the mean, because at the same number of false names both
take longer. No test can tell a straggler from the first steps of a turn.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from muster.daemon.coordinator.core.state.block_times import BlockTime, RankPace, RankPaces

LEAST_SHARE = 0.12
"""Share of the usual compute time by which a slow rank is longer, at least. A block with less counts against it. In
logarithms it is somewhat less than half of 30 %, so such a rank gains more than equal ranks lose."""
LEAST_US = 1000
"""Microseconds by which a slow rank is longer, at least: a process that is scheduled late is as late as that."""
LEAST_BLOCKS = 18
"""Blocks with evidence (72 steps) before a rank is named: it is slow, and not only for a turn of some tens of steps."""
QUICK_BLOCKS = 5
"""The same in a steady gang (20 steps). A time with evidence for so many blocks that is over ends the steadiness."""
SETTLED_BLOCKS = 512
"""Blocks (2048 steps) of a generation before a gang counts as steady."""
ENOUGH = 7.5
"""The logarithm of the likelihood ratio that names a rank, without `FOR_RANKS`. `make bench-stragglers` measures both
errors: late names, and false ones."""
FOR_RANKS = 1.5
"""The logarithm of the number of ranks is added so many times: each of them is a further chance to be wrong."""
WIDE_DEVIATION = 0.28
"""Where blocks deviate by more, one may add more than its part: a turn adds little there, and the bound wastes much."""
MOST_AGAINST = 3
"""A block takes away so many times as much as it may add. A rank that keeps pace for a third of the time has no
evidence."""
DEVIATION_OF_MEDIAN = 1.4826
"""The standard deviation of normally distributed values, as a multiple of their median absolute deviation. The
differences of pairs of them have one that is longer by the square root of 2."""
LEAST_DEVIATION = 0.02
"""Equal ranks differ by some percent, even if they have not done so yet."""
FIRST_CHANGES = 4
"""Changes that only tell how much times differ. The first steps of a generation are slow anyway."""
MOST_PART = 0.25
"""The part of the ranks that may be suspects at the same time. One always may, and so may the ranks of one node."""
SUSPECT_PART = 0.4
"""A rank is a suspect from this part of the needed evidence on."""
BLOCKS_OF_UNREST = 1024
"""Blocks (4096 steps) over which the unrest is a mean; older ones count less and less."""
CAUTION = 12
"""The evidence that is needed is so many times the unrest, and at least 1. Strong noise makes an unrest of a 12th."""
MOST_NEEDED = 6
"""The evidence that is needed at most, so that a straggler is named also where nodes are slow in turn."""
WAIT_PART = 0.5
"""The part of the excess that the median rank must wait longer than the slow rank. Other waits blur it."""
BLOCKS_OF_MEAN = 32
"""Newest blocks with evidence of which a rank's times are the mean."""
TIMES_KEPT = 64
"""Newest times in which a rank was a straggler that are kept. A rank that comes and goes more often in a rule's window
does not last."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """How a block is judged for the ranks of one group. `usual_us`: the median compute time of all other ranks.

    `least`: the excess from which on a block counts for a slow rank. `weight`: the evidence of each unit above it.
    """

    usual_us: float
    least: float
    weight: float


def follow(paces: RankPaces, times: Mapping[int, BlockTime], ranks_per_node: int, now: float) -> None:
    """Judge one more block: change what is known of the ranks."""
    if len(times) < 2:
        return
    # The ranks of a node are not compared with each other, unless there are no others.
    apart = ranks_per_node if len({rank // ranks_per_node for rank in times}) > 1 else 1
    paces.ranks = {rank: paces.ranks.get(rank) or RankPace() for rank in times}
    needed = {rank: _needed(paces, pace) for rank, pace in paces.ranks.items()}
    is_steady = paces.is_steady and paces.blocks >= SETTLED_BLOCKS
    least_blocks = QUICK_BLOCKS if is_steady else LEAST_BLOCKS
    _add_block(paces, times, apart, needed, least_blocks)
    suspects = {rank for rank, pace in paces.ranks.items() if pace.evidence >= SUSPECT_PART * needed[rank]}
    uneven = len({rank // apart for rank in suspects}) > 1 and len(suspects) > MOST_PART * len(times)
    candidates = {rank: pace for rank, pace in paces.ranks.items() if pace.named or rank in suspects}
    for rank, pace in candidates.items():
        _name(pace, not uneven and pace.evidence >= needed[rank] and pace.blocks >= least_blocks, now)
    paces.stragglers = {rank: pace for rank, pace in candidates.items() if pace.named}


def _needed(paces: RankPaces, pace: RankPace) -> float:
    """The evidence that names the rank. What this rank has added to the unrest, since its evidence was 0 last, does not
    count."""
    return min(max(CAUTION * (paces.unrest - pace.total_evidence / BLOCKS_OF_UNREST), 1.0), MOST_NEEDED)


def _add_block(
    paces: RankPaces, times: Mapping[int, BlockTime], apart: int, needed: Mapping[int, float], least_blocks: int
) -> None:
    """Add the evidence of the block to that of each rank."""
    wait_us = statistics.median_high(time.wait_us for time in times.values())
    deviation = _deviation(paces)
    scales = _scales(times, apart, deviation)
    most = max(1.0, deviation / WIDE_DEVIATION) / least_blocks
    is_noise_known = len(paces.changes) >= FIRST_CHANGES
    changes = []
    for rank, time in times.items():
        pace, scale = paces.ranks[rank], scales[rank // apart]
        excess = math.log(max(time.compute_us, 1) / scale.usual_us)
        if pace.last_excess is not None:
            changes.append(abs(excess - pace.last_excess))
        pace.last_excess = excess
        if is_noise_known:
            gain = min(max(scale.weight * (excess - scale.least), -MOST_AGAINST * most), most)
            pace.evidence = min(max(pace.evidence + gain, 0.0), needed[rank])
            if pace.evidence == 0.0 and pace.blocks >= QUICK_BLOCKS:
                paces.is_steady = False
            _note_times(pace, time.compute_us, scale.usual_us, wait_us - time.wait_us)
    paces.changes.extend([statistics.median(changes)] if changes else [])
    paces.blocks += 1
    most_evidence = max((pace.evidence for pace in paces.ranks.values() if not pace.named), default=0.0)
    paces.unrest += (most_evidence - paces.unrest) / BLOCKS_OF_UNREST


def _scales(times: Mapping[int, BlockTime], apart: int, deviation: float) -> dict[int, _Scale]:
    """For each group of `apart` ranks in a row. The weight is that of the likelihood ratio of two normal distributions
    whose means are 0 and twice `least`."""
    enough = ENOUGH + FOR_RANKS * math.log(len(times))
    usual = _medians_elsewhere({rank: time.compute_us for rank, time in times.items()}, apart)
    scales = {}
    for group, usual_us in usual.items():
        least = math.log1p(max(LEAST_SHARE, LEAST_US / usual_us))
        scales[group] = _Scale(usual_us, least, 2 * least / deviation**2 / enough)
    return scales


def _deviation(paces: RankPaces) -> float:
    """How much the excess of equal ranks differs. Few blocks do not tell it well, so it is then taken for more."""
    if not paces.changes:
        return LEAST_DEVIATION
    found = DEVIATION_OF_MEDIAN / math.sqrt(2) * statistics.median(paces.changes)
    return max(found * (1 + 1 / math.sqrt(len(paces.changes))), LEAST_DEVIATION)


def _medians_elsewhere(values: Mapping[int, int], apart: int) -> dict[int, float]:
    """For each group of `apart` ranks in a row, the median of the values of all other ranks, 1 at least."""
    ordered = sorted(values, key=values.__getitem__)
    places: dict[int, list[int]] = {}
    for place, rank in enumerate(ordered):
        places.setdefault(rank // apart, []).append(place)
    medians = {}
    for group, own in places.items():
        count = len(ordered) - len(own)
        middle = (values[ordered[_place_of(index, own)]] for index in ((count - 1) // 2, count // 2))
        medians[group] = max(sum(middle) / 2, 1.0)
    return medians


def _place_of(index: int, left_out: Iterable[int]) -> int:
    """The place of number `index` of those that remain without the places `left_out`, which are in order."""
    for place in left_out:
        if place > index:
            break
        index += 1
    return index


def _note_times(pace: RankPace, compute_us: float, usual_us: float, waited_us: float) -> None:
    """If the rank is slow, it is so since its evidence was 0 last."""
    if pace.evidence == 0.0:
        pace.blocks, pace.total_evidence = 0, 0.0
        return
    pace.blocks += 1
    pace.total_evidence += pace.evidence
    weight = 1 / min(pace.blocks, BLOCKS_OF_MEAN)
    pace.compute_us += weight * (compute_us - pace.compute_us)
    pace.usual_us += weight * (usual_us - pace.usual_us)
    pace.waited_us += weight * (waited_us - pace.waited_us)


def _name(pace: RankPace, may_begin: bool, now: float) -> None:
    """Begin, prolong or end the time in which the rank is a straggler."""
    if pace.named:
        pace.named_times[-1] = (pace.named_times[-1][0], now)
        pace.named = pace.evidence > 0.0
    elif may_begin and _is_waited_for(pace):
        pace.named = True
        pace.named_times = [*pace.named_times[1 - TIMES_KEPT :], (now, now)]


def _is_waited_for(pace: RankPace) -> bool:
    return pace.waited_us >= WAIT_PART * (pace.compute_us - pace.usual_us)
