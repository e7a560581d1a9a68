"""From one run of a job to its next: an agent that leaves because the job is requeued leaves its shards with this
node's musterd, and the agent of the next run takes them back.

Only whole, digested shards in this node's own slots go, with their digests; each byte is verified before it counts
again. All of it may fail: then the next run starts from durable storage.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Protocol

from google.protobuf.message import DecodeError

from muster.checkpoint import transfer
from muster.checkpoint.errors import BadShard
from muster.checkpoint.shards import Shard
from muster.checkpoint.slots import SEALS
from muster.daemon.memory_line import MOST_SHARDS, ask
from muster.v1.memory_pb2 import KeptShards
from muster.v1.peer_pb2 import ShardOffer

log = logging.getLogger(__name__)

TAKE_BACK_S = 20.0
"""What has not been verified by then is done without: the gang waits for this agent."""


class Keeper(Protocol):
    """Of the memory store (muster.checkpoint.keeper.Keeper), what is needed here."""

    def own_shards(self) -> list[Shard]: ...
    async def take_back(self, offer: ShardOffer, descriptor: int) -> None: ...


class Handover:
    """One agent's.

    Args:
        gang, node, job: who leaves and who comes back, in which Slurm job.
        path: where musterd listens; empty: nothing is left, nothing is taken.
    """

    def __init__(self, gang: str, node: str, job: int, path: str) -> None:
        self._gang, self._node, self._job = gang, node, job
        self._path = path

    async def leave(self, keeper: Keeper, generation: int) -> None:
        """Leave this node's shards with musterd, if it is there and takes them. `generation`: the gang's newest."""
        shards = keeper.own_shards()[:MOST_SHARDS]
        if not self._path or not shards:
            return
        newest = max(generation, *(shard.stamp.generation for shard in shards))
        request = {"keep": {"gang_id": self._gang, "slurm_job_id": self._job, "generation": newest}}
        with ExitStack() as held:
            for shard in shards:
                held.enter_context(shard.held())
            index = self._describe(shards)
            held.callback(os.close, index)
            try:
                answer, _ = await asyncio.to_thread(ask, self._path, request, [index, *(s.memory.fd for s in shards)])
            except OSError as error:
                log.info("no memory is left for the next run: %s: %s", self._path, error)
                return
        if refused := answer.get("refused"):
            log.info("musterd keeps no memory for the next run: %s", refused)
            return
        log.info("left with musterd for the next run: %s", _words(shards))

    def _describe(self, shards: Sequence[Shard]) -> int:
        """A memfd with the shards' descriptions; the caller closes it."""
        kept = KeptShards(shards=[transfer.offer_of(self._gang, self._node, shard) for shard in shards])
        index = os.memfd_create(f"muster-{self._gang}-kept", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(index, "wb", closefd=False) as file:
            file.write(kept.SerializeToString())
        fcntl.fcntl(index, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_WRITE)
        return index

    async def take(self, keeper: Keeper) -> None:
        """Take back what the run before has left on this node. What is damaged is dropped."""
        if not self._path:
            return
        try:
            _, fds = await asyncio.to_thread(ask, self._path, {"take": {"gang_id": self._gang}})
        except OSError as error:
            log.info("no memory of an earlier run: %s: %s", self._path, error)
            return
        if not fds:
            return
        index, *memfds = fds
        offers = _read(index)
        if len(offers) != len(memfds):
            log.error("%d shards are described, and %d memfds were left: none is used", len(offers), len(memfds))
            _close(memfds)
            return
        try:
            async with asyncio.timeout(TAKE_BACK_S):
                await _verified(keeper, offers, memfds)
        except TimeoutError:
            log.warning("not all of the memory that the run before has left was verified in %.0f s", TAKE_BACK_S)


async def _verified(keeper: Keeper, offers: Sequence[ShardOffer], memfds: Sequence[int]) -> None:
    """Have the keeper take in each shard, all at once: its threads share the work."""
    tasks = (keeper.take_back(offer, fd) for offer, fd in zip(offers, memfds, strict=True))
    for offer, error in zip(offers, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
        version = transfer.stamp_of(offer)
        if isinstance(error, BadShard):
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
    return ", ".join(f"rank {shard.rank} at {shard.stamp}" for shard in shards)
