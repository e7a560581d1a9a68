"""From one run of a job to its next: an agent whose job is to be requeued leaves its shards with this node's musterd,
and the agent of the next run takes them back.

Only whole, digested shards in this node's own slots go, with their digests; each byte is verified before it counts
again. All of it may fail: then the next run starts from durable storage.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from threading import Lock
from typing import Protocol

from google.protobuf.message import DecodeError

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.store.memory.sealed_memory import MEMFD_SEALS
from muster.checkpoint.store.memory.shards import Shard
from muster.checkpoint.store.replication import transfer
from muster.daemon.host import packets
from muster.daemon.host.kept_memory_client import MAX_SHARDS, open_request, send_request
from muster.v1.memory_pb2 import KeptShards
from muster.v1.peer_pb2 import ShardOffer

log = logging.getLogger(__name__)

RECLAIM_BASE_S, RECLAIM_MAX_S = 20.0, 180.0
"""What has not been verified by then, or by when its size explains it, is done without: the gang waits."""
VERIFY_BYTES_PER_S = 0.5e9
"""Bytes a second that are verified at the least: a core digests two or three times as much."""
_PATIENCE_S = 3.0
"""A musterd that is being started again is asked again for so long."""
_TAKEN: packets.Message = {"taken": {}}


class Keeper(Protocol):
    """Of the memory store (muster.checkpoint.store.checkpoint_service.Keeper), what is needed here."""

    def slot_shards(self) -> list[Shard]: ...
    async def adopt_shard(self, offer: ShardOffer, descriptor: int) -> None: ...


class MemoryHandover:
    """One agent's.

    Args:
        gang, node, job: who leaves and who comes back, in which Slurm job.
        path: where musterd listens; empty: nothing is left, nothing is taken.
    """

    def __init__(self, gang: str, node: str, job: int, path: str) -> None:
        self._gang, self._node, self._job = gang, node, job
        self._path = path
        self._lent: socket.socket | None = None
        self._left = False
        self._turn = Lock()

    async def deposit(self, keeper: Keeper, generation: int) -> None:
        """Leave this node's shards with musterd, if it is there and takes them, in the place of what was left before.
        `generation`: the gang's newest."""
        shards = newest_first(keeper.slot_shards())[:MAX_SHARDS]
        if not self._path or not shards:
            return
        newest = max(generation, *(shard.version.generation for shard in shards))
        request = {"keep": {"gang_id": self._gang, "slurm_job_id": self._job, "generation": newest}}
        self._left = True
        with ExitStack() as held:
            for shard in shards:
                held.enter_context(shard.held())
            try:
                answer = await asyncio.to_thread(self._ask, request, self._descriptors(shards))
            except (OSError, ValueError) as error:
                log.info("no memory is left for the next run: %s: %s", self._path, error)
                return
        if refused := answer.get("refused"):
            log.info("musterd keeps no memory for the next run: %s", refused)
            return
        self.confirm()
        log.info("left with musterd for the next run: %s", _words(shards))

    async def withdraw(self) -> None:
        """There is no next run: have musterd let go of what was left."""
        if not self._left:
            return
        with suppress(OSError, ValueError):
            line, _, fds = await asyncio.to_thread(self._call, {"take": {"gang_id": self._gang}})
            _close(fds)
            with line:
                packets.send(line, _TAKEN)

    def _ask(self, request: packets.Message, fds: Sequence[int]) -> packets.Message:
        """In a thread, which may go on when nobody waits for it any more: the descriptors are its own."""
        try:
            with self._turn:
                return send_request(self._path, request, fds, patience_s=_PATIENCE_S)[0]
        finally:
            _close(fds)

    def _call(self, request: packets.Message) -> tuple[socket.socket, packets.Message, list[int]]:
        with self._turn:
            return open_request(self._path, request, patience_s=_PATIENCE_S)

    def _descriptors(self, shards: Sequence[Shard]) -> list[int]:
        """New ones: of a memfd with the shards' descriptions, and of each shard's.

        Raises:
            OSError: there are no more to be had.
        """
        fds: list[int] = []
        try:
            fds.append(self._describe(shards))
            fds.extend(os.dup(shard.memory.fd) for shard in shards)
        except OSError:
            _close(fds)
            raise
        return fds

    def _describe(self, shards: Sequence[Shard]) -> int:
        """A memfd with the shards' descriptions; the caller closes it."""
        kept = KeptShards(shards=[transfer.make_offer(self._gang, self._node, shard) for shard in shards])
        index = os.memfd_create(f"muster-{self._gang}-kept", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(index, "wb", closefd=False) as file:
            file.write(kept.SerializeToString())
        fcntl.fcntl(index, fcntl.F_ADD_SEALS, MEMFD_SEALS | fcntl.F_SEAL_WRITE)
        return index

    async def reclaim(self, keeper: Keeper) -> int:
        """Take back what the run before has left on this node. What is damaged is dropped. If this agent ends before
        `confirm`, it is musterd's again.

        Returns:
            The gang's newest generation when it was left; 0 where nothing was.
        """
        if not self._path:
            return 0
        try:
            self._lent, answer, fds = await asyncio.to_thread(self._call, {"take": {"gang_id": self._gang}})
        except (OSError, ValueError) as error:
            log.info("no memory of an earlier run: %s: %s", self._path, error)
            return 0
        if not fds:
            return 0
        index, *memfds = fds
        offers = _read(index)
        if len(offers) != len(memfds):
            log.error("%d shards are described, and %d memfds were left: none is used", len(offers), len(memfds))
            _close(memfds)
            return 0
        limit_s = _limit_s(memfds)
        try:
            async with asyncio.timeout(limit_s):
                await _verified(keeper, offers, memfds)
        except TimeoutError:
            log.warning("not all of the memory that the run before has left was verified in %.0f s", limit_s)
        return int(answer.get("generation", 0))

    def confirm(self) -> None:
        """The coordinator has heard of what was taken back: it is this agent's for good."""
        line, self._lent = self._lent, None
        if line is not None:
            with line, suppress(OSError):
                packets.send(line, _TAKEN)


def newest_first(shards: Sequence[Shard]) -> list[Shard]:
    """A version of which a shard is missing is of no use: where not all fit, the newest is whole."""
    return sorted(shards, key=lambda shard: shard.version, reverse=True)


def _limit_s(memfds: Sequence[int]) -> float:
    size = sum(os.fstat(fd).st_size for fd in memfds)
    return min(RECLAIM_BASE_S + size / VERIFY_BYTES_PER_S, RECLAIM_MAX_S)


async def _verified(keeper: Keeper, offers: Sequence[ShardOffer], memfds: Sequence[int]) -> None:
    """Have the keeper take in each shard, all at once: its threads share the work."""
    tasks = (keeper.adopt_shard(offer, fd) for offer, fd in zip(offers, memfds, strict=True))
    for offer, error in zip(offers, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
        version = transfer.version_of_offer(offer)
        if isinstance(error, CorruptShard):
            log.error("rank %d's shard of %s, which the run before has left, is bad: %s", offer.rank, version, error)
        elif error is not None:
            raise error
        else:
            log.info("rank %d's shard of %s is back from the run before", offer.rank, version)


def _read(index: int) -> list[ShardOffer]:
    """The descriptions; none where they can't be read."""
    try:
        with open(index, "rb") as file:
            file.seek(0)
            return list(KeptShards.FromString(file.read()).shards)
    except (OSError, DecodeError) as error:
        log.error("what the run before has left can't be told: %s", error)
        return []


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _words(shards: Sequence[Shard]) -> str:
    return ", ".join(f"rank {shard.rank} at {shard.version}" for shard in shards)
