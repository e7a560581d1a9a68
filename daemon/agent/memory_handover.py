"""Keep shards over a requeue. An agent whose job is requeued deposits its shards with the node's musterd; the agent of
the next run reclaims them.

Only complete, digested shards in this node's own slots are deposited, with their digests. Each byte is verified before
it counts again. If anything fails, the next run starts from durable storage.

Shards are deposited at two moments. The first is when the ranks of a planned stop have ended, before anything is
written: Slurm's SIGKILL may come sooner than the checkpoint is done. The second is an order EXIT that says that the job
is requeued; one that says that the job is over withdraws the memory. Until the coordinator has heard of memory that is
taken back, it is only lent: an agent that ends before that loses nothing.
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

from google.protobuf.message import DecodeError

from muster.checkpoint.format.errors import CorruptShard, OtherLayout
from muster.checkpoint.store.checkpoint_service import CheckpointService
from muster.checkpoint.store.memory.sealed_memory import MEMFD_SEALS
from muster.checkpoint.store.memory.shards import Shard
from muster.checkpoint.store.replication import shard_offers
from muster.daemon.host import packets
from muster.daemon.host.kept_memory_client import MAX_SHARDS, open_request, send_request
from muster.v1.memory_pb2 import KeptShards
from muster.v1.peer_pb2 import ShardOffer

log = logging.getLogger(__name__)

RECLAIM_BASE_S, RECLAIM_MAX_S = 20.0, 180.0
"""Seconds for verification: RECLAIM_BASE_S plus the time for the bytes, RECLAIM_MAX_S at most. Shards that are not
verified by then are not used, because the gang waits."""
VERIFY_BYTES_PER_S = 0.5e9
"""The slowest verification in bytes per second that is allowed for. One core digests two to three times as fast
(measured)."""
_RETRY_S = 3.0
"""Seconds for which calls are retried while musterd restarts."""
_TAKEN: packets.Message = {"taken": {}}


class MemoryHandover:
    """The handover of one agent.

    Args:
        gang, node, job: the gang, this node, and the Slurm job.
        path: musterd's socket; empty: deposit and reclaim nothing.
        store: has this node's shards.
    """

    def __init__(self, gang: str, node: str, job: int, path: str, store: CheckpointService) -> None:
        self._gang, self._node, self._job = gang, node, job
        self._path = path
        self._store = store
        self._newest_generation = 0
        self._loan: socket.socket | None = None
        self._deposited = False
        self._call_lock = Lock()

    async def deposit(self) -> None:
        """Deposit this node's shards with musterd, in place of an earlier deposit. If musterd is absent or refuses, log
        it."""
        shards = newest_first(self._store.slot_shards())[:MAX_SHARDS]
        if not self._path or not shards:
            return
        newest = max(self._newest_generation, *(shard.version.generation for shard in shards))
        request = {"keep": {"gang_id": self._gang, "slurm_job_id": self._job, "generation": newest}}
        self._deposited = True
        with ExitStack() as held:
            for shard in shards:
                held.enter_context(shard.held())
            try:
                answer = await asyncio.to_thread(self._send_request, request, self._duplicate_fds(shards))
            except (OSError, ValueError) as error:
                log.info("deposited no memory for the next run: %s: %s", self._path, error)
                return
        if refused := answer.get("refused"):
            log.info("musterd refused to keep memory for the next run: %s", refused)
            return
        self._end_loan()
        log.info("deposited with musterd for the next run: %s", _describe_shards(shards))

    async def withdraw(self) -> None:
        """No next run will come: have musterd release an earlier deposit."""
        if not self._deposited:
            return
        with suppress(OSError, ValueError):
            connection, _, fds = await asyncio.to_thread(self._open_request, {"take": {"gang_id": self._gang}})
            _close_all(fds)
            with connection:
                packets.send(connection, _TAKEN)

    def _send_request(self, request: packets.Message, fds: Sequence[int]) -> packets.Message:
        """Runs in a thread that may go on when nobody waits for it any more: the thread owns `fds` and closes them."""
        try:
            with self._call_lock:
                return send_request(self._path, request, fds, retry_s=_RETRY_S)[0]
        finally:
            _close_all(fds)

    def _open_request(self, request: packets.Message) -> tuple[socket.socket, packets.Message, list[int]]:
        with self._call_lock:
            return open_request(self._path, request, retry_s=_RETRY_S)

    def _duplicate_fds(self, shards: Sequence[Shard]) -> list[int]:
        """Return new descriptors: first a memfd with the shards' descriptions, then one for each shard.

        Raises:
            OSError: no descriptors are available.
        """
        fds: list[int] = []
        try:
            fds.append(self._make_description(shards))
            fds.extend(os.dup(shard.memory.fd) for shard in shards)
        except OSError:
            _close_all(fds)
            raise
        return fds

    def _make_description(self, shards: Sequence[Shard]) -> int:
        """Return a memfd with the shards' descriptions; the caller closes it."""
        kept = KeptShards(shards=[shard_offers.make_offer(self._gang, self._node, shard) for shard in shards])
        index = os.memfd_create(f"muster-{self._gang}-kept", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(index, "wb", closefd=False) as file:
            file.write(kept.SerializeToString())
        fcntl.fcntl(index, fcntl.F_ADD_SEALS, MEMFD_SEALS | fcntl.F_SEAL_WRITE)
        return index

    async def reclaim(self) -> None:
        """Reclaim what the previous run has deposited on this node. Damaged shards are dropped. Until the first order,
        musterd takes everything back if this agent ends."""
        if not self._path:
            return
        try:
            self._loan, answer, fds = await asyncio.to_thread(self._open_request, {"take": {"gang_id": self._gang}})
        except (OSError, ValueError) as error:
            log.info("no memory of an earlier run: %s: %s", self._path, error)
            return
        if not fds:
            return
        index, *memfds = fds
        offers = _read_descriptions(index)
        if len(offers) != len(memfds):
            log.error("the deposit describes %d shards but holds %d memfds: none is used", len(offers), len(memfds))
            _close_all(memfds)
            return
        limit_s = _verification_timeout_s(memfds)
        try:
            async with asyncio.timeout(limit_s):
                await _verify_all(self._store, offers, memfds)
        except TimeoutError:
            log.warning("not all memory of the previous run was verified within %.0f s", limit_s)
        self._newest_generation = int(answer.get("generation", 0))

    def meet_order(self, generation: int) -> None:
        """An order of this generation has come. So the coordinator has received a status with the reclaimed shards:
        musterd may forget them."""
        self._newest_generation = max(self._newest_generation, generation)
        self._end_loan()

    def _end_loan(self) -> None:
        connection, self._loan = self._loan, None
        if connection is not None:
            with connection, suppress(OSError):
                packets.send(connection, _TAKEN)


def newest_first(shards: Sequence[Shard]) -> list[Shard]:
    """Sort newest first. A version with a missing shard is useless, so if not all shards fit, the newest version stays
    complete."""
    return sorted(shards, key=lambda shard: shard.version, reverse=True)


def _verification_timeout_s(memfds: Sequence[int]) -> float:
    size = sum(os.fstat(fd).st_size for fd in memfds)
    return min(RECLAIM_BASE_S + size / VERIFY_BYTES_PER_S, RECLAIM_MAX_S)


async def _verify_all(store: CheckpointService, offers: Sequence[ShardOffer], memfds: Sequence[int]) -> None:
    """Have the checkpoint store verify all shards at once: its threads share the work."""
    tasks = (store.adopt_shard(offer, fd) for offer, fd in zip(offers, memfds, strict=True))
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    others = [outcome for outcome in outcomes if isinstance(outcome, OtherLayout)]
    if others:
        log.error(
            "%d of %d shards of the previous run are not used: %s. The job goes on from its newest durable checkpoint",
            len(others),
            len(offers),
            others[0],
        )
    for offer, error in zip(offers, outcomes, strict=True):
        version = shard_offers.version_of_offer(offer)
        if isinstance(error, OtherLayout):
            continue
        if isinstance(error, CorruptShard):
            log.error("rank %d's shard of %s from the previous run is damaged: %s", offer.rank, version, error)
        elif error is not None:
            raise error
        else:
            log.info("reclaimed rank %d's shard of %s from the previous run", offer.rank, version)


def _read_descriptions(index: int) -> list[ShardOffer]:
    """Return the descriptions; an empty list if they can't be read."""
    try:
        with open(index, "rb") as file:
            file.seek(0)
            return list(KeptShards.FromString(file.read()).shards)
    except (OSError, DecodeError) as error:
        log.error("the descriptions of the previous run's shards can't be read: %s", error)
        return []


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _describe_shards(shards: Sequence[Shard]) -> str:
    return ", ".join(f"rank {shard.rank} at {shard.version}" for shard in shards)
