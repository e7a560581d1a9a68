"""What failures cost: time between them, the best checkpoint interval, the share of time that trains. Pure.

Sources: Young, "A first order approximation to the optimum checkpoint interval" (1974); Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps" (2006). All times in one unit, seconds unless a name
says otherwise.
"""

from __future__ import annotations

import math


def fleet_mtbf(unit_mtbf: float, units: int) -> float:
    """Mean time between failures of all units together: MTBF / units, in the unit of `unit_mtbf`.

    A job of nodes counts nodes, not GPUs, if the MTBF is that of a node.
    """
    return unit_mtbf / units


def observed_mtbf(expected: float, failures: int, watched: float) -> float:
    """Mean time between failures of a unit after `failures` of them in `watched`, the time of all units together.

    `expected`: the mean time that was expected before. It counts as one failure in that time (the mean of a Gamma
    distribution of the rate), so that the first failures do not move the estimate at will.
    """
    return (expected + watched) / (1 + failures)


def young_interval(mtbf: float, checkpoint: float) -> float:
    """Young's time between checkpoints: √(2δM), where a checkpoint takes δ."""
    return math.sqrt(2 * checkpoint * mtbf)


def daly_interval(mtbf: float, checkpoint: float) -> float:
    """Daly's time between checkpoints: √(2δM)(1 + ⅓√(δ/2M) + ⅑ δ/2M) − δ for δ < 2M, and M above that."""
    if checkpoint >= 2 * mtbf:
        return mtbf
    part = checkpoint / (2 * mtbf)
    return young_interval(mtbf, checkpoint) * (1 + math.sqrt(part) / 3 + part / 9) - checkpoint


def goodput(mtbf: float, interval: float, checkpoint: float, recovery: float) -> float:
    """The share of time that trains, with failures in checkpoints and recoveries too: Daly's complete model.

    τ / (M e^(R/M) (e^((τ+δ)/M) − 1)): an interval τ, a checkpoint δ, a recovery R and a mean time M between failures.
    """
    spent = (interval + checkpoint) / mtbf
    if spent + recovery / mtbf > 500:  # e^500: the job never finishes an interval
        return 0.0
    return interval / (mtbf * math.exp(recovery / mtbf) * math.expm1(spent))


def spares_suffice(nodes: int, node_mtbf: float, repair: float, spares: int) -> float:
    """The probability that a spare is there when a node fails.

    Failed nodes under repair are a Poisson number with the mean nodes · repair / MTBF (Palm's theorem). A spare is
    there if fewer than `spares` of them are under repair.
    """
    mean = nodes * repair / node_mtbf
    if mean > 700:  # e^-700 is the smallest that a float holds
        return 0.0
    term = math.exp(-mean)
    total = 0.0
    for count in range(spares):
        total += term
        term *= mean / (count + 1)
    return min(1.0, total)


def expected_recovery(with_spare: float, without: float, probability: float) -> float:
    """Mean time of a recovery, if a spare is there with this probability."""
    return probability * with_spare + (1 - probability) * without
