"""Which pieces come to this node now: equal pieces of several ranks come once.

Ranks of one node may hold equal bytes that no rank of this node holds. Their offers come at about the same time. The
offer that comes first brings the pieces, the others wait for it, and their replicas refer to its replica.
"""

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from muster.checkpoint.format.versions import Version


class IncomingPieces:
    """The pieces that offers bring. An offer waits for earlier ones only, so that no two wait for each other."""

    def __init__(self) -> None:
        self._claimed: dict[tuple[Version, bytes], asyncio.Event] = {}
        """For each piece, by its version and digest, what is set when the offer that brings it is over."""

    @contextmanager
    def claim(self, version: Version, digests: Collection[bytes]) -> Iterator[tuple[set[bytes], set[asyncio.Event]]]:
        """Bring these pieces for an offer inside a `with` block, as far as no earlier offer brings them.

        Yields:
            The digests that this offer has to bring, and what is set when the earlier offers with the others are over,
            well or not.
        """
        over = asyncio.Event()
        earlier = {digest: event for digest in digests if (event := self._claimed.get((version, digest)))}
        mine = set(digests) - earlier.keys()
        self._claimed.update({(version, digest): over for digest in mine})
        try:
            yield mine, set(earlier.values())
        finally:
            for digest in mine:
                del self._claimed[version, digest]
            over.set()
