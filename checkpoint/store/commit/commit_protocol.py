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

from muster.checkpoint.format.errors import BadShard
from muster.checkpoint.format.versions import NOTHING, Stamp
from muster.checkpoint.store.commit.commit_tracker import Ballot, Verdict
from muster.checkpoint.store.memory.shards import Shard, Shelf
from muster.checkpoint.store.replication.replica_receiver import Refused, replicate
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


class Agreement:
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
        shelf: Shelf,
        dial: Callable[[str], "PeerServiceAsyncStub"],
        spawn: Callable[[int, Coroutine[Any, Any, None]], asyncio.Task[None]],
        settled: Callable[[], None],
        now: Callable[[], int],
    ) -> None:
        self._gang_id = gang_id
        self._node = node
        self._shelf = shelf
        self._dial = dial
        self._spawn = spawn
        self._settled = settled
        self._now = now
        self._answered: set[int] = set()
        self.next_step = 0
        self._peers: dict[str, str] = {}
        self._stored: dict[Stamp, set[int]] = {}
        self._void = NOTHING
        self._doubling: asyncio.Task[None] | None = None
        self._ballot = Ballot(0, frozenset())
        self.committed = NOTHING
        self.fenced = 0
        self.order = Order()
        self.local: frozenset[int] = frozenset()
        self.skipped = NOTHING
        """The newest version that this node will never store; nor what was named before it and is not committed."""

    def enlist(self, order: Order) -> bool:
        """Take note of an order; returns whether it starts a generation that this node didn't know of."""
        if order.members:
            self._peers = {m.node: m.peer_address for m in order.members}
        if order.duty != DUTY_RUN or order.generation <= max(self.order.generation, self.fenced):
            return False
        self.order = order
        self.local = frozenset(p.rank for p in order.places if p.node == self._node)
        self._ballot = Ballot(order.generation, frozenset(p.node for p in order.places))
        self._stored, self.skipped = {}, NOTHING
        self.next_step, self._answered = 0, set()
        self._stop_doubling()
        return True

    def fence(self, generation: int) -> None:
        """Nothing up to this generation is agreed on any more."""
        self.fenced = generation

    def stale(self, stamp: Stamp) -> str:
        """Why nothing is done for a version any more; empty where it is alive."""
        if stamp == self._restored():
            return ""
        if stamp.generation <= self.fenced:
            return f"generation {stamp.generation} is fenced on {self._node}"
        if stamp < self.committed:
            return f"{stamp} is older than what is committed ({self.committed})"
        if self._is_void(stamp):
            return f"{stamp} is void: some rank has no snapshot of it"
        return ""

    def _is_void(self, stamp: Stamp) -> bool:
        return stamp.generation == self._void.generation and self.committed < stamp <= self._void

    def _restored(self) -> Stamp | None:
        """The version that the running generation started from; None once it has committed one, or is fenced."""
        order = self.order
        past = order.generation <= self.fenced or self.committed.generation >= order.generation
        return None if past or not order.restore.HasField("version") else Stamp.of(order.restore.version)

    def unwanted(self, stamp: Stamp) -> bool:
        """Whether a slot that has just been filled with this version may be written again at once."""
        return self._is_void(stamp) or stamp <= self.committed

    # This node's shards.

    def filled(self, rank: int, stamp: Stamp) -> None:
        """A rank of this node has kept a step."""
        if stamp.step >= self.next_step:
            self._answered.add(rank)

    def skip(self, rank: int, stamp: Stamp) -> None:
        """A rank of this node had no slot for a step that was due; that is news where it is the one that all keep."""
        if rank in self._answered or stamp.step < self.next_step:
            return
        self._answered.add(rank)
        self.give_up(stamp)

    def give_up(self, stamp: Stamp) -> None:
        """This node will never store a version: the leader shall know."""
        if stamp > self.skipped and not self.stale(stamp):
            self.skipped = stamp
            self._spawn(stamp.generation, self._report(stamp, skipped=True))

    def take_up(self, shard: Shard) -> None:
        """A slot of this node is filled and digested: bring it to its second copy."""
        if shard.stamp.generation == self.order.generation and not self.stale(shard.stamp):
            self._spawn(shard.stamp.generation, self._store(shard))

    async def _store(self, shard: Shard) -> None:
        """See to it that a shard stands twice, then report where it is this node's last of the version."""
        try:
            if not await self._second(shard):
                return
        except BadShard:
            self.give_up(shard.stamp)
            return
        stored = self._stored.setdefault(shard.stamp, set())
        stored.add(shard.rank)
        if stored >= self.local:
            await self._report(shard.stamp, skipped=False)

    def stepped(self) -> None:
        """All ranks of this node have finished a step of the generation: what it started from may travel again."""
        if self._doubling is None and self._restored() is not None:
            self._doubling = self._spawn(self.order.generation, self._double())

    async def _double(self) -> None:
        """See to it that this node's shards of the version that the generation started from stand with its buddy."""
        await asyncio.sleep(SETTLED_S)
        for rank in sorted(self.local):
            stamp = self._restored()
            shard = self._shelf.own(rank, stamp) if stamp is not None else None
            if shard is not None:
                with suppress(BadShard):  # what is left of it is another node's copy
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
            BadShard: its bytes have changed; it is quarantined.
        """
        for delay in _delays():
            if self.stale(shard.stamp) or self._shelf.own(shard.rank, shard.stamp) is not shard:
                return False
            try:
                await self._replicate(shard)
                return True
            except BadShard as error:
                self._shelf.quarantine(shard, str(error))
                raise
            except (Refused, grpc.aio.AioRpcError) as error:
                if self.stale(shard.stamp):
                    return False
                words = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                log.info("rank %d's shard of %s has no second copy yet: %s", shard.rank, shard.stamp, words)
            await asyncio.sleep(delay)
        return False

    async def _replicate(self, shard: Shard) -> None:
        buddy = next((m.buddy for m in self.order.members if m.node == self._node), "")
        if buddy and buddy != self._node:
            sent = await replicate(self._gang_id, self._node, shard, self._stub(buddy))
            log.debug("rank %d's shard of %s stands twice, %d bytes sent", shard.rank, shard.stamp, sent)

    async def _report(self, stamp: Stamp, *, skipped: bool) -> None:
        """Tell the leader how this node stands, until it has heard."""
        leader = next((p.node for p in self.order.places if p.rank == 0), self._node)
        if leader == self._node:
            self._count(self._node, stamp, skipped)
            return
        report = peer_pb2.StoredReport(gang_id=self._gang_id, node=self._node, version=stamp.version(), skipped=skipped)
        for delay in _delays():
            try:
                ack = await self._stub(leader).Stored(report, timeout=NOTICE_TIMEOUT_S)
                words = ack.refused
            except (Refused, grpc.aio.AioRpcError) as error:
                words = str(error)
            if not words or self.stale(stamp):
                return
            # A leader that hasn't had its order yet refuses, too.
            log.info("%s, who leads, did not take the report of %s: %s", leader, stamp, words)
            await asyncio.sleep(delay)

    # The leader's part.

    def hear_report(self, request: peer_pb2.StoredReport) -> str:
        """A node's ranks stand twice at a version, or never will; returns why that isn't taken."""
        stamp = Stamp.of(request.version)
        if request.gang_id != self._gang_id or stamp.generation != self._ballot.generation:
            return f"{self._node} counts for generation {self._ballot.generation} of gang {self._gang_id}"
        if stamp.generation <= self.fenced:
            return f"{self._node} has fenced generation {self.fenced}"
        self._count(request.node, stamp, request.skipped)
        return ""

    def _count(self, node: str, stamp: Stamp, skipped: bool) -> None:
        count = self._ballot.skipped if skipped else self._ballot.stored
        verdict = count(node, stamp, self._now())
        if verdict is None:
            return
        for member in self._peers:
            self._spawn(stamp.generation, self._notify(member, verdict))
        self._settle(verdict)

    async def _notify(self, node: str, verdict: Verdict) -> None:
        """Tell a node until it has heard: without its ranks no further step is kept."""
        if node == self._node:
            return
        notice = peer_pb2.CommitNotice(
            gang_id=self._gang_id,
            node=self._node,
            version=verdict.stamp.version(),
            void=verdict.void,
            next_step=verdict.next_step,
            committed=verdict.committed.version(),
        )
        for delay in _delays():
            try:
                await self._stub(node).Committed(notice, timeout=NOTICE_TIMEOUT_S)
                return
            except (Refused, grpc.aio.AioRpcError) as error:
                words = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                log.info("%s did not hear of %s: %s", node, verdict.stamp, words)
            await asyncio.sleep(delay)
            if self._ballot.next_step > verdict.next_step or verdict.stamp.generation <= self.fenced:
                return

    # What everyone hears.

    def hear_notice(self, request: peer_pb2.CommitNotice) -> str:
        """A version is committed, or void; returns why that isn't taken."""
        stamp = Stamp.of(request.version)
        if request.gang_id != self._gang_id or stamp.generation <= self.fenced:
            return f"{self._node} has fenced generation {self.fenced} of gang {self._gang_id}"
        self._settle(Verdict(stamp, request.void, request.next_step, Stamp.of(request.committed)))
        return ""

    def _settle(self, verdict: Verdict) -> None:
        stamp = verdict.stamp
        if stamp.generation == self.order.generation and verdict.next_step > self.next_step:
            self.next_step = verdict.next_step
            self._answered.clear()
        if verdict.committed > self.committed:
            self._commit(verdict.committed)
        if verdict.void and stamp > self._void:
            self._void = stamp
            self._shelf.drop(lambda s: self._is_void(s.stamp), "some rank has no snapshot of it")
        self._settled()

    def _commit(self, stamp: Stamp) -> None:
        self.committed = stamp
        # It would hold on to a slot that is to be written again.
        self._stop_doubling()
        self._shelf.drop(lambda s: s.stamp < stamp, "a newer version is committed")
        self._stored = {s: ranks for s, ranks in self._stored.items() if s > stamp}

    def _stub(self, node: str) -> "PeerServiceAsyncStub":
        if node not in self._peers:
            raise Refused(f"the order names no address for {node}")
        return self._dial(self._peers[node])


def _delays() -> Iterator[float]:
    """Pauses between tries: the last one for ever."""
    yield from RETRY_S
    while True:
        yield RETRY_S[-1]
