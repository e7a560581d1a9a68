"""The digests at the end of a rank's file in a durable checkpoint. There is one for each block, so that whoever reads a
few tensors verifies these and no more.

    offset        content
    0             the items, as torch.distributed.checkpoint reads them by offset and length
    data_bytes    for each block of BLOCK_BYTES of the items, XXH3-128 of its bytes (16 bytes)

The manifest has `data_bytes`, and the digest of these digests. Torch reads nothing behind the items.
"""

import xxhash

BLOCK_BYTES = 4 << 20
"""Bytes under one digest. The last block of a file may be shorter."""
DIGEST_BYTES = 16


def trailer_bytes(data_bytes: int) -> int:
    """The size of the digests of so many bytes of items."""
    return -(-data_bytes // BLOCK_BYTES) * DIGEST_BYTES


class BlockDigests:
    """The digests of a file that grows."""

    def __init__(self) -> None:
        self._done = bytearray()
        self._block, self._left = xxhash.xxh3_128(), BLOCK_BYTES

    def update(self, data: memoryview) -> None:
        """Further bytes of the file."""
        while len(data):
            part = data[: self._left]
            self._block.update(part)
            data, self._left = data[len(part) :], self._left - len(part)
            if not self._left:
                self._end_block()

    def finish(self) -> bytes:
        """The digests of all blocks."""
        if self._left < BLOCK_BYTES:
            self._end_block()
        return bytes(self._done)

    def _end_block(self) -> None:
        self._done += self._block.digest()
        self._block, self._left = xxhash.xxh3_128(), BLOCK_BYTES
