"""How a version comes to be committed: each shard gets its second copy, each node reports, the leader decides.

The leader of a generation is the agent of rank 0's node. What a version's fate is, everyone learns from its notice:
committed, so that all that is older goes; or void, because some rank has no snapshot of it, so that its slots are free,
and those of what is older and not committed.

The version that a generation starts from was committed by an earlier one, and a copy of it may have gone with a node.
Until the generation has committed a version itself, that is all there is: it is brought to its second copy again.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.versions import NO_VERSION, Version
from muster.checkpoint.store.commit.commit_tracker import CommitDecision, CommitTracker
from muster.checkpoint.store.memory.shards import Shard, ShardStore
from muster.checkpoint.store.replication.replica_receiver import ReplicaRefused, replicate
from muster.v1 import peer_pb2
from muster.v1.agent_pb2 import DUTY_RUN, Order

if TYPE_CHECKING:
    from muster.v1.peer_pb2_grpc import PeerServiceAsyncStub

log = logging.getLogger(__name__)

NOTICE_TIMEOUT_S = 2.0
RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)

SETTLED_S = 1.0
"""How long a generation is left alone after its first step. Where it keeps every step it has committed one by then,
and no bytes of the version before need to travel."""


class CommitProtocol:
    """One node's part in it.

    Args:
        gang_id, node: who speaks.
        shelf: where shards stand; what is settled goes from it.
        dial: a stub for a peer's address.
        spawn: runs a coroutine beside, as a task, on behalf of a generation: it is cancelled when that is fenced.
        settled: called when a version's fate is known.
        now: the newest step that some rank of this node can't keep any more.
    """

    def __init__(
        self,
        gang_id: str,
        node: str,
        shard_store: ShardStore,
        dial: Callable[[str], "PeerServiceAsyncStub"],
        spawn: Callable[[int, Coroutine[Any, Any, None]], asyncio.Task[None]],
        settled: Callable[[], None],
        now: Callable[[], int],
    ) -> None:
        self._gang_id = gang_id
        self._node = node
        self._shard_store = shard_store
        self._dial = dial
        self._spawn = spawn
        self._settled = settled
        self._now = now
        self._answered: set[int] = set()
        self.next_step = 0
        self._peers: dict[str, str] = {}
        self._stored: dict[Version, set[int]] = {}
        self._void = NO_VERSION
        self._doubling: asyncio.Task[None] | None = None
        self._commit_tracker = CommitTracker(0, frozenset())
        self.committed = NO_VERSION
        self.fenced = 0
        self.order = Order()
        self.local: frozenset[int] = frozenset()
        self.skipped = NO_VERSION
        """The newest version that this node will never store; nor what was named before it and is not committed."""

    def enlist(self, order: Order) -> bool:
        """Take note of an order; returns whether it starts a generation that this node didn't know of."""
        if order.members:
            self._peers = {m.node: m.peer_address for m in order.members}
        if order.duty != DUTY_RUN or order.generation <= max(self.order.generation, self.fenced):
            return False
        self.order = order
        self.local = frozenset(p.rank for p in order.places if p.node == self._node)
        self._commit_tracker = CommitTracker(order.generation, frozenset(p.node for p in order.places))
        self._stored, self.skipped = {}, NO_VERSION
        self.next_step, self._answered = 0, set()
        self._stop_doubling()
        return True

    def fence(self, generation: int) -> None:
        """Nothing up to this generation is agreed on any more."""
        self.fenced = generation

    def stale(self, version: Version) -> str:
        """Why nothing is done for a version any more; empty where it is alive."""
        if version == self._restored():
            return ""
        if version.generation <= self.fenced:
            return f"generation {version.generation} is fenced on {self._node}"
        if version < self.committed:
            return f"{version} is older than what is committed ({self.committed})"
        if self._is_void(version):
            return f"{version} is void: some rank has no snapshot of it"
        return ""

    def _is_void(self, version: Version) -> bool:
        return version.generation == self._void.generation and self.committed < version <= self._void

    def _restored(self) -> Version | None:
        """The version that the running generation started from; None once it has committed one, or is fenced."""
        order = self.order
        past = order.generation <= self.fenced or self.committed.generation >= order.generation
        return None if past or not order.restore.HasField("version") else Version.from_wire(order.restore.version)

    def unwanted(self, version: Version) -> bool:
        """Whether a slot that has just been filled with this version may be written again at once."""
        return self._is_void(version) or version <= self.committed

    # This node's shards.

    def filled(self, rank: int, version: Version) -> None:
        """A rank of this node has kept a step."""
        if version.step >= self.next_step:
            self._answered.add(rank)

    def skip(self, rank: int, version: Version) -> None:
        """A rank of this node had no slot for a step that was due; that is news where it is the one that all keep."""
        if rank in self._answered or version.step < self.next_step:
            return
        self._answered.add(rank)
        self.give_up(version)

    def give_up(self, version: Version) -> None:
        """This node will never store a version: the leader shall know."""
        if version > self.skipped and not self.stale(version):
            self.skipped = version
            self._spawn(version.generation, self._report(version, skipped=True))

    def take_up(self, shard: Shard) -> None:
        """A slot of this node is filled and digested: bring it to its second copy."""
        if shard.version.generation == self.order.generation and not self.stale(shard.version):
            self._spawn(shard.version.generation, self._store(shard))

    async def _store(self, shard: Shard) -> None:
        """See to it that a shard stands twice, then report where it is this node's last of the version."""
        try:
            if not await self._second(shard):
                return
        except CorruptShard:
            self.give_up(shard.version)
            return
        stored = self._stored.setdefault(shard.version, set())
        stored.add(shard.rank)
        if stored >= self.local:
            await self._report(shard.version, skipped=False)

    def stepped(self) -> None:
        """All ranks of this node have finished a step of the generation: what it started from may travel again."""
        if self._doubling is None and self._restored() is not None:
            self._doubling = self._spawn(self.order.generation, self._double())

    async def _double(self) -> None:
        """See to it that this node's shards of the version that the generation started from stand with its buddy."""
        await asyncio.sleep(SETTLED_S)
        for rank in sorted(self.local):
            version = self._restored()
            shard = self._shard_store.own(rank, version) if version is not None else None
            if shard is not None:
                with suppress(CorruptShard):  # what is left of it is another node's copy
                    await self._second(shard)

    def _stop_doubling(self) -> None:
        if self._doubling is not None:
            self._doubling.cancel()
            self._doubling = None

    async def _second(self, shard: Shard) -> bool:
        """Bring a shard to its second copy; tried again until its version is settled.

        Returns:
            Whether it stands twice; False: it is not wanted any more.

        Raises:
            CorruptShard: its bytes have changed; it is quarantined.
        """
        for delay in _delays():
            if self.stale(shard.version) or self._shard_store.own(shard.rank, shard.version) is not shard:
                return False
            try:
                await self._replicate(shard)
                return True
            except CorruptShard as error:
                self._shard_store.quarantine(shard, str(error))
                raise
            except (ReplicaRefused, grpc.aio.AioRpcError) as error:
                if self.stale(shard.version):
                    return False
                words = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                log.info("rank %d's shard of %s has no second copy yet: %s", shard.rank, shard.version, words)
            await asyncio.sleep(delay)
        return False

    async def _replicate(self, shard: Shard) -> None:
        buddy = next((m.buddy for m in self.order.members if m.node == self._node), "")
        if buddy and buddy != self._node:
            sent = await replicate(self._gang_id, self._node, shard, self._stub(buddy))
            log.debug("rank %d's shard of %s stands twice, %d bytes sent", shard.rank, shard.version, sent)

    async def _report(self, version: Version, *, skipped: bool) -> None:
        """Tell the leader how this node stands, until it has heard."""
        leader = next((p.node for p in self.order.places if p.rank == 0), self._node)
        if leader == self._node:
            self._count(self._node, version, skipped)
            return
        report = peer_pb2.StoredReport(
            gang_id=self._gang_id, node=self._node, version=version.to_wire(), skipped=skipped
        )
        for delay in _delays():
            try:
                ack = await self._stub(leader).Stored(report, timeout=NOTICE_TIMEOUT_S)
                words = ack.refused
            except (ReplicaRefused, grpc.aio.AioRpcError) as error:
                words = str(error)
            if not words or self.stale(version):
                return
            # A leader that hasn't had its order yet refuses, too.
            log.info("%s, who leads, did not take the report of %s: %s", leader, version, words)
            await asyncio.sleep(delay)

    # The leader's part.

    def hear_report(self, request: peer_pb2.StoredReport) -> str:
        """A node's ranks stand twice at a version, or never will; returns why that isn't taken."""
        version = Version.from_wire(request.version)
        if request.gang_id != self._gang_id or version.generation != self._commit_tracker.generation:
            return f"{self._node} counts for generation {self._commit_tracker.generation} of gang {self._gang_id}"
        if version.generation <= self.fenced:
            return f"{self._node} has fenced generation {self.fenced}"
        self._count(request.node, version, request.skipped)
        return ""

    def _count(self, node: str, version: Version, skipped: bool) -> None:
        count = self._commit_tracker.skipped if skipped else self._commit_tracker.stored
        verdict = count(node, version, self._now())
        if verdict is None:
            return
        for member in self._peers:
            self._spawn(version.generation, self._notify(member, verdict))
        self._settle(verdict)

    async def _notify(self, node: str, verdict: CommitDecision) -> None:
        """Tell a node until it has heard: without its ranks no further step is kept."""
        if node == self._node:
            return
        notice = peer_pb2.CommitNotice(
            gang_id=self._gang_id,
            node=self._node,
            version=verdict.version.to_wire(),
            void=verdict.void,
            next_step=verdict.next_step,
            committed=verdict.committed.to_wire(),
        )
        for delay in _delays():
            try:
                await self._stub(node).Committed(notice, timeout=NOTICE_TIMEOUT_S)
                return
            except (ReplicaRefused, grpc.aio.AioRpcError) as error:
                words = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                log.info("%s did not hear of %s: %s", node, verdict.version, words)
            await asyncio.sleep(delay)
            if self._commit_tracker.next_step > verdict.next_step or verdict.version.generation <= self.fenced:
                return

    # What everyone hears.

    def hear_notice(self, request: peer_pb2.CommitNotice) -> str:
        """A version is committed, or void; returns why that isn't taken."""
        version = Version.from_wire(request.version)
        if request.gang_id != self._gang_id or version.generation <= self.fenced:
            return f"{self._node} has fenced generation {self.fenced} of gang {self._gang_id}"
        self._settle(CommitDecision(version, request.void, request.next_step, Version.from_wire(request.committed)))
        return ""

    def _settle(self, verdict: CommitDecision) -> None:
        version = verdict.version
        if version.generation == self.order.generation and verdict.next_step > self.next_step:
            self.next_step = verdict.next_step
            self._answered.clear()
        if verdict.committed > self.committed:
            self._commit(verdict.committed)
        if verdict.void and version > self._void:
            self._void = version
            self._shard_store.drop(lambda s: self._is_void(s.version), "some rank has no snapshot of it")
        self._settled()

    def _commit(self, version: Version) -> None:
        self.committed = version
        # It would hold on to a slot that is to be written again.
        self._stop_doubling()
        self._shard_store.drop(lambda s: s.version < version, "a newer version is committed")
        self._stored = {s: ranks for s, ranks in self._stored.items() if s > version}

    def _stub(self, node: str) -> "PeerServiceAsyncStub":
        if node not in self._peers:
            raise ReplicaRefused(f"the order names no address for {node}")
        return self._dial(self._peers[node])


def _delays() -> Iterator[float]:
    """Pauses between tries: the last one for ever."""
    yield from RETRY_S
    while True:
        yield RETRY_S[-1]
