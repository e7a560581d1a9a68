"""One link of a network, as the α–β model sees it: a message of B bytes takes latency + B / bandwidth seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from muster.fabric.model.errors import FabricError

MOST_LATENCY_S = 60.0
"""A longer latency is a mistake in a file: a message around the earth takes 0.2 s."""
MOST_BANDWIDTH = 1e18
"""Bytes per second. A faster link is a mistake in a file: an accelerator's own memory has less than 1e14."""


@dataclass(frozen=True, slots=True)
class Link:
    """A link, in one direction.

    Raises:
        FabricError: a number is negative, not finite, or larger than any link has.
    """

    latency: float
    """Seconds from the start of a message until its first byte arrives (α)."""
    bandwidth: float
    """Bytes per second (β)."""

    def __post_init__(self) -> None:
        """Refuses numbers that no link has, NaN too."""
        if not 0 <= self.latency <= MOST_LATENCY_S:
            raise FabricError(f"a latency of {self.latency:g} s: a link has 0 to {MOST_LATENCY_S:g} s")
        if not 0 < self.bandwidth <= MOST_BANDWIDTH:
            raise FabricError(
                f"a bandwidth of {self.bandwidth:g} B/s: a link has more than 0 and at most {MOST_BANDWIDTH:g} B/s"
            )

    def time(self, size: float) -> float:
        """Seconds that one message of `size` bytes takes."""
        return self.latency + size / self.bandwidth

    def shared_by(self, flows: float) -> Link:
        """What one of `flows` equal flows has of this link. `flows` may be a ratio, for example 4 for 4:1."""
        return Link(self.latency, self.bandwidth / flows)


def in_series(links: Iterable[Link]) -> Link:
    """What a message sees that crosses parallel parts of one path: the longest latency and the lowest bandwidth.

    The latency of a tier is measured from end to end, so the latencies of the tiers below are a part of it.
    """
    every = tuple(links)
    return Link(max(link.latency for link in every), min(link.bandwidth for link in every))
