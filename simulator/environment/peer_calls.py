"""What agents tell each other about copies: offers, reports and decisions. They are lost, late and doubled.

An agent calls another agent, and calls again until it is answered. A call that was answered too late for its caller
has been made nevertheless, and one that the network keeps for long arrives when nobody waits for it any more.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeerCallConditions:
    """Probabilities for each call.

    `lost_rate`: it never arrives. `unanswered_rate`: it arrives, and the answer is lost. `late_rate`: it arrives up to
    `longest_s` seconds later. `doubled_rate`: it arrives at once, and once more up to `longest_s` seconds later.
    """

    lost_rate: float = 0.0
    unanswered_rate: float = 0.0
    late_rate: float = 0.0
    doubled_rate: float = 0.0
    longest_s: float = 4.0


RELIABLE = PeerCallConditions()


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one call. `late_s`, `again_s`: seconds until it arrives, and arrives again; `again_s` 0: once."""

    arrives: bool = True
    answered: bool = True
    late_s: float = 0.0
    again_s: float = 0.0


class PeerCalls:
    """Draws the fate of each call. Conditions that lose nothing draw nothing."""

    def __init__(self, conditions: PeerCallConditions, rng: random.Random) -> None:
        self._conditions = conditions
        self._rng = rng

    def draw(self) -> Fate:
        """The fate of the next call."""
        conditions, rng = self._conditions, self._rng
        if conditions is RELIABLE:
            return Fate()
        return Fate(
            arrives=rng.random() >= conditions.lost_rate,
            answered=rng.random() >= conditions.unanswered_rate,
            late_s=conditions.longest_s * rng.random() if rng.random() < conditions.late_rate else 0.0,
            again_s=conditions.longest_s * rng.random() if rng.random() < conditions.doubled_rate else 0.0,
        )
