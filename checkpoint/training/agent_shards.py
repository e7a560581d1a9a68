"""The shards of the ranks that wrote a state, as far as the agent has brought their bytes. No torch."""

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from muster.checkpoint.format import layout
from muster.checkpoint.format.errors import CheckpointError
from muster.v1.rank_pb2 import AgentRead, ByteRange, RankRead

MAX_RANGES = 1000
"""Ranges in one message, which has room for 64 KiB."""

ByteSpan = tuple[int, int]
"""Offset of the first byte, and offset behind the last one."""


class ReadsShards(Protocol):
    """The part of the connection to the agent that reads shards."""

    def read_shards(self, reads: Iterable[RankRead]) -> Iterator[tuple[AgentRead, int]]:
        """Have parts of shards brought; each answer comes with a descriptor that the caller closes."""
        ...

    def end_reads(self) -> None:
        """Nothing more is read."""
        ...


class AgentShards:
    """The old ranks' shards, mapped read only. A context manager: at its end the agent may free its memory.

    Only bytes that `bring_headers` and `bring` have brought may be read.
    """

    def __init__(self, connection: ReadsShards) -> None:
        self._connection = connection
        self._views: dict[int, memoryview] = {}

    def view(self, rank: int) -> memoryview:
        """The bytes of an old rank's shard. They are undefined where nothing was brought."""
        return self._views[rank]

    def bring_headers(self, ranks: Iterable[int]) -> None:
        """Bring the headers of these old ranks' shards, from their index on.

        Raises:
            RestoreError: the agent can't.
        """
        self._bring(RankRead(rank=rank, header=True) for rank in ranks if rank not in self._views)

    def bring(self, spans: Mapping[int, Iterable[ByteSpan]]) -> None:
        """Bring bytes of old ranks' shards.

        Raises:
            RestoreError: the agent can't.
        """
        self._bring(read for rank, wanted in spans.items() for read in _reads(rank, joined(wanted)))

    def _bring(self, reads: Iterable[RankRead]) -> None:
        for answer, descriptor in self._connection.read_shards(reads):
            try:
                # A new mapping each time: a shard that has proved corrupt goes on in other memory.
                # It is private, because torch needs memory that it could write to.
                access = mmap.PROT_READ | mmap.PROT_WRITE
                self._views[answer.rank] = memoryview(
                    mmap.mmap(descriptor, answer.bytes, flags=mmap.MAP_PRIVATE, prot=access)
                )
            except (OSError, ValueError) as error:
                raise CheckpointError(f"the shard of rank {answer.rank} can't be mapped: {error}") from error
            finally:
                os.close(descriptor)

    def __enter__(self) -> "AgentShards":
        return self

    def __exit__(self, *_: object) -> None:
        self._views.clear()
        self._connection.end_reads()


def joined(spans: Iterable[ByteSpan]) -> list[ByteSpan]:
    """The same bytes in few spans: those with less than a piece between them become one, which costs no whole piece."""
    found: list[ByteSpan] = []
    for first, end in sorted(spans):
        if found and first - found[-1][1] < layout.PIECE_BYTES:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return found


def _reads(rank: int, spans: list[ByteSpan]) -> Iterator[RankRead]:
    for start in range(0, len(spans), MAX_RANGES):
        some = spans[start : start + MAX_RANGES]
        yield RankRead(rank=rank, ranges=[ByteRange(offset=first, length=end - first) for first, end in some])
