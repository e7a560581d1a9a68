"""Answers the ranks of this node that ask for the state to start from, or for parts of it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from muster import compatibility
from muster.checkpoint.format.errors import RestoreError
from muster.checkpoint.store.rank_sockets import RankSockets
from muster.checkpoint.store.restore.recall import Recall
from muster.checkpoint.store.restore.shard_reads import ShardReads
from muster.v1 import rank_pb2
from muster.v1.common_pb2 import Release

_SIDE = compatibility.own_side("this node's agent")
_RELEASE = compatibility.to_wire(_SIDE)


class RankRestores:
    """The restores of this node's ranks.

    Args:
        sockets: of the ranks.
        recall: has the states of ranks that start from their own shards.
        shard_reads: has the shards of all ranks, if their number has changed.
        on_change: called when a restore has come further.
    """

    def __init__(
        self, sockets: RankSockets, recall: Recall, shard_reads: ShardReads, on_change: Callable[[], None]
    ) -> None:
        self._sockets, self._recall, self._shard_reads, self._on_change = sockets, recall, shard_reads, on_change

    async def join(self, rank: int, generation: int, release: Release) -> None:
        """Answer a rank that asks where to start. Without an answer it would wait for ever.

        `release`: what the library in the rank's process says of its version.
        """
        try:
            _check_version(rank, release)
            await self._send_recalled_state(rank, generation)
        except RestoreError as error:
            refusal = rank_pb2.AgentRestore(refused=str(error), release=_RELEASE)
            self._sockets.send_in(generation, rank, rank_pb2.AgentRankMessage(restore=refusal))
        except BaseException:
            self._sockets.close_rank(rank, generation)
            raise

    async def _send_recalled_state(self, rank: int, generation: int) -> None:
        if self._shard_reads.written_ranks:
            answer = rank_pb2.AgentRestore(
                version=self._shard_reads.version.to_wire(),
                written_ranks=self._shard_reads.written_ranks,
                release=_RELEASE,
            )
            self._sockets.send_in(generation, rank, rank_pb2.AgentRankMessage(restore=answer))
            return
        recalled = await self._recall.wait_for(rank)
        answer = rank_pb2.AgentRestore(
            durable_path=recalled.durable_path, skip_to_step=recalled.skip_to_step, release=_RELEASE
        )
        if recalled.shard is None:
            self._sockets.send_in(generation, rank, rank_pb2.AgentRankMessage(restore=answer))
            return
        answer.version.CopyFrom(recalled.shard.version.to_wire())
        answer.bytes = recalled.shard.bytes
        with recalled.shard.held(), _closing(recalled.shard.memory.open_read_only()) as fd:
            self._sockets.send_in(generation, rank, rank_pb2.AgentRankMessage(restore=answer), fd)

    async def read(self, rank: int, generation: int, read: rank_pb2.RankRead) -> None:
        """Answer a rank that asks for bytes of a shard. Without an answer it would wait for ever."""
        answer = rank_pb2.AgentRead(rank=read.rank)
        try:
            spans = [(span.offset, span.offset + span.length) for span in read.ranges]
            memory = await self._shard_reads.read(read.rank, read.header, spans)
            self._on_change()
            answer.bytes = memory.size
            with _closing(memory.open_read_only()) as fd:
                self._sockets.send_in(generation, rank, rank_pb2.AgentRankMessage(read=answer), fd)
        except RestoreError as error:
            answer.refused = str(error)
            self._sockets.send_in(generation, rank, rank_pb2.AgentRankMessage(read=answer))
        except BaseException:
            self._sockets.close_rank(rank, generation)
            raise


def _check_version(rank: int, release: Release) -> None:
    """Raises RestoreError: the library in the rank's process and this agent do not fit."""
    if reason := compatibility.misfit(_SIDE, compatibility.read(f"the library of rank {rank}", release)):
        raise RestoreError(reason)


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)
