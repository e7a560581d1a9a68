"""How the agents of a generation commit a version: replicate each shard, report it, receive the leader's decision.

The commit leader is the agent on rank 0's node (see `commit_tracker`). Its decision says that a version is committed,
so that all older versions are dropped, or that the version is void, so that its slots are free again together with the
slots of older versions that are not committed.

A generation starts from a version that an earlier generation committed. A replica of that version may have been lost
with a node. Until the generation commits a version itself, no other state exists, so that version is replicated again.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc

from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.format.replica_agreement import ReplicaAgreement, ReplicaDigest, ReplicaDigests
from muster.checkpoint.format.versions import NO_VERSION, Version
from muster.checkpoint.redundancy.scheme import NodePlaces, Place
from muster.checkpoint.redundancy.wire import places_of_order
from muster.checkpoint.store.commit.commit_tracker import CommitDecision, CommitTracker
from muster.checkpoint.store.commit.refusals import Refusals
from muster.checkpoint.store.commit.snapshot_interval import SnapshotCosts
from muster.checkpoint.store.memory.shards import Shard, ShardStore
from muster.checkpoint.store.replication.dial import Dial
from muster.checkpoint.store.replication.replicate import ReplicaRefused, replicate
from muster.checkpoint.store.replication.transfer_rates import TransferRates
from muster.checkpoint.store.streams.transport import PieceTransport
from muster.v1 import peer_pb2
from muster.v1.agent_pb2 import DUTY_RUN, Order, ReplicaDisagreement

if TYPE_CHECKING:
    from muster.v1.peer_pb2_grpc import PeerServiceAsyncStub

log = logging.getLogger(__name__)

REPORT_TIMEOUT_S = 2.0
"""Seconds for one report or one decision to be answered; then it is sent again."""

RETRY_DELAYS_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Seconds between attempts; the last value repeats."""

RESTORED_VERSION_DELAY_S = 1.0
"""Seconds between the first step of a generation and the replication of the version that it started from. A generation
that keeps every step has committed a version by then, and no bytes of the older version need to travel."""


class CommitProtocol:
    """One agent's part in committing versions.

    Args:
        gang_id, node: the gang and the node of this agent.
        shard_store: the shards of this node; decided versions are dropped from it.
        dial: returns a stub for the agent on a node.
        transport: how pieces travel.
        spawn: runs a coroutine as a task of a generation; the task is cancelled when the generation is fenced.
        on_decision: called after each commit decision.
        reserve: called on a node without ranks, with the bytes of the largest slot and the most ranks of a node.
        passed_step: returns the newest step that some rank of this node can no longer keep.
    """

    def __init__(
        self,
        gang_id: str,
        node: str,
        shard_store: ShardStore,
        dial: Dial,
        transport: PieceTransport,
        spawn: Callable[[int, Coroutine[Any, Any, None]], asyncio.Task[None]],
        on_decision: Callable[[], None],
        passed_step: Callable[[], int],
        reserve: Callable[[int, int], None],
    ) -> None:
        self._gang_id = gang_id
        self._node = node
        self._shard_store = shard_store
        self._dial = dial
        self._transport = transport
        self._spawn = spawn
        self._on_decision = on_decision
        self._passed_step = passed_step
        self._reserve = reserve
        self._slot_bytes = 0
        """On the commit leader: the largest slot of any rank that was reported."""
        self._ranks_per_node = 0
        """The most ranks of a node in this generation."""
        self._answered_ranks: set[int] = set()
        """Ranks of this node that have kept or skipped the step that all ranks keep next."""
        self._skipped_last: dict[int, Version] = {}
        """Ranks of this node that have kept no step since they skipped this one."""
        self.next_step = 0
        self._peer_addresses: dict[str, str] = {}
        self._replicated_ranks: dict[Version, set[int]] = {}
        self._void = NO_VERSION
        self._restored_version_task: asyncio.Task[None] | None = None
        self._tracker = CommitTracker(0, frozenset())
        self.disagreement: ReplicaDisagreement | None = None
        """On the commit leader: the first version of this generation on which replicas disagree."""
        self.committed = NO_VERSION
        self.fenced_generation = 0
        self.transfer_rates = TransferRates()
        self.refusals = Refusals()
        self.order = Order()
        self.local_ranks: frozenset[int] = frozenset()
        self.places = NodePlaces()
        """What this node sends and keeps in this generation."""
        self.costs = SnapshotCosts()
        """What snapshots cost in this generation. Complete on the commit leader, whose node has rank 0."""
        self._stalls: dict[Version, float] = {}
        """For versions that are not decided: the longest stall in seconds, of this node; on the leader of all nodes."""
        self.skipped = NO_VERSION
        """The newest version that this node will never store. Older versions that are not committed are skipped too."""

    def apply_order(self, order: Order) -> bool:
        """Take the members and ranks from an order; returns whether the order starts a generation unknown so far."""
        if order.members:
            self._peer_addresses = {member.node: member.peer_address for member in order.members}
        if order.duty == DUTY_RUN and order.generation == self._tracker.generation:
            self._tracker.agreement.enabled = not order.replicas_differ
        if order.duty != DUTY_RUN or order.generation <= max(self.order.generation, self.fenced_generation):
            return False
        self.order = order
        self.local_ranks = frozenset(place.rank for place in order.places if place.node == self._node)
        self.places = places_of_order(order, self._node)
        ranks_by_node = Counter(place.node for place in order.places)
        nodes = frozenset(ranks_by_node)
        self._ranks_per_node = max(ranks_by_node.values(), default=0)
        self._tracker = CommitTracker(
            order.generation, nodes, ReplicaAgreement(set(order.agreed_groups), not order.replicas_differ)
        )
        self.disagreement = None
        self._replicated_ranks, self.skipped = {}, NO_VERSION
        self.costs, self._stalls = SnapshotCosts(order.mtbf_s), {}
        self.next_step, self._answered_ranks, self._skipped_last = 0, set(), {}
        self.refusals.clear()
        self._cancel_restored_version_task()
        return True

    def address_of(self, node: str) -> str:
        """The address ("host:port") of the agent on a node; empty: no order has named it."""
        return self._peer_addresses.get(node, "")

    def fence(self, generation: int) -> None:
        """Take no further part in committing versions up to this generation."""
        self.fenced_generation = generation

    def stale_reason(self, version: Version) -> str:
        """Why a version is no longer replicated or committed; empty if it still is."""
        if version == self._restored_version():
            return ""
        if version.generation <= self.fenced_generation:
            return f"generation {version.generation} is fenced on {self._node}"
        if version < self.committed:
            return f"{version} is older than the committed {self.committed}"
        if self._is_void(version):
            return f"{version} is void"
        return ""

    def _is_void(self, version: Version) -> bool:
        return version.generation == self._void.generation and self.committed < version <= self._void

    def _restored_version(self) -> Version | None:
        """The version that the running generation started from; None after its first commit or its fence."""
        order = self.order
        over = order.generation <= self.fenced_generation or self.committed.generation >= order.generation
        return None if over or not order.restore.HasField("version") else Version.from_wire(order.restore.version)

    def is_not_needed(self, version: Version) -> bool:
        """Whether a slot that was just filled with this version may be written again at once."""
        return self._is_void(version) or version <= self.committed

    # The shards of this node.

    def record_filled(self, rank: int, version: Version, stall_s: float = 0.0) -> None:
        """Record that a rank of this node has filled a slot, which held its training up for `stall_s` seconds."""
        self._note_stall(version, stall_s)
        self._skipped_last.pop(rank, None)
        if version.step >= self.next_step:
            self._answered_ranks.add(rank)

    def record_skipped(self, rank: int, version: Version) -> None:
        """Record that a rank of this node had no slot for a due step. Only the step that all ranks keep matters."""
        self._skipped_last[rank] = version
        if rank in self._answered_ranks or version.step < self.next_step:
            return
        self._answered_ranks.add(rank)
        self.skip(version)

    def record_new_slots(self, rank: int, generation: int) -> None:
        """Record that a rank of this node asks for slots. It has its state, so shards that no restore plan needs are
        dropped. It will not be told any more which older step was to be kept, and other ranks may wait for that step:
        what it skipped last, and all before, is void."""
        restored = Version.from_wire(self.order.restore.version)
        self._shard_store.drop_versions(
            lambda version: version.generation < generation and version != restored, "a newer generation runs"
        )
        if rank in self._skipped_last:
            self.skip(self._skipped_last.pop(rank))

    def skip(self, version: Version) -> None:
        """Report to the commit leader that this node will never store a version."""
        if version > self.skipped and not self.stale_reason(version):
            self.skipped = version
            self._spawn(version.generation, self._report(version, skipped=True))

    def start_replication(self, shard: Shard) -> None:
        """Replicate a shard of this node: its slot is filled and digested."""
        if shard.version.generation == self.order.generation and not self.stale_reason(shard.version):
            self._spawn(shard.version.generation, self._replicate_and_report(shard))

    async def _replicate_and_report(self, shard: Shard) -> None:
        """Replicate a shard, then report the version if this was the node's last shard of it."""
        try:
            if not await self._replicate_until_stored(shard):
                return
        except CorruptShard:
            self.skip(shard.version)
            return
        replicated = self._replicated_ranks.setdefault(shard.version, set())
        replicated.add(shard.rank)
        if replicated >= self.local_ranks:
            await self._report(shard.version, skipped=False)

    def all_ranks_stepped(self) -> None:
        """Replicate the restored version: all ranks of this node have finished a step of the generation."""
        if self._restored_version_task is None and self._restored_version() is not None:
            self._restored_version_task = self._spawn(self.order.generation, self._replicate_restored_version())

    async def _replicate_restored_version(self) -> None:
        """Replicate this node's shards of the version that the generation started from."""
        await asyncio.sleep(RESTORED_VERSION_DELAY_S)
        for rank in self._restored_ranks():
            version = self._restored_version()
            shard = self._restored_shard(rank, version) if version is not None else None
            if shard is not None:
                with suppress(CorruptShard):  # another node may still hold an intact replica
                    await self._replicate_until_stored(shard)

    def _restored_ranks(self) -> list[int]:
        """The ranks whose shards of the restored version are this node's to replicate.

        If another number of ranks wrote it, these are the shards that the plan would take from this node first: its
        own, and replicas of nodes that are gone. All ranks need them until the next commit. Only whole copies of them
        are kept.
        """
        if not self.order.restore.resharded:
            return sorted(self.local_ranks)
        if not self.places.others_sent:
            return []
        first: dict[int, str] = {}
        for source in self.order.restore.sources:
            first.setdefault(source.rank, source.node)
        return sorted(rank for rank, node in first.items() if node == self._node)

    def _restored_shard(self, rank: int, version: Version) -> Shard | None:
        find = self._shard_store.find if self.order.restore.resharded else self._shard_store.slot_shard
        return find(rank, version)

    def _cancel_restored_version_task(self) -> None:
        if self._restored_version_task is not None:
            self._restored_version_task.cancel()
            self._restored_version_task = None

    async def _replicate_until_stored(self, shard: Shard) -> bool:
        """Bring a shard to all its places; retry until its version is decided.

        Returns:
            True: it is in all of them. False: the version is no longer needed.

        Raises:
            CorruptShard: the shard's bytes have changed; the shard is quarantined.
        """
        for delay in _retry_delays():
            if self.stale_reason(shard.version) or self._shard_store.find(shard.rank, shard.version) is not shard:
                break
            try:
                await self._replicate(shard)
                return True
            except CorruptShard as error:
                self._shard_store.quarantine(shard, str(error))
                raise
            except (ReplicaRefused, grpc.aio.AioRpcError) as error:
                if self.stale_reason(shard.version):
                    break
                why = _why(error)
                log.info("rank %d's shard of %s is not in all its places yet: %s", shard.rank, shard.version, why)
            await asyncio.sleep(delay)
        for place in self.places.sent(shard.rank):
            self.refusals.end(place.holder)
        return False

    async def _replicate(self, shard: Shard) -> None:
        """Bring the shard to all its places at the same time."""
        brought = (self._bring(shard, place) for place in self.places.sent(shard.rank))
        outcomes = await asyncio.gather(*brought, return_exceptions=True)
        failures = [outcome for outcome in outcomes if outcome is not None]
        if failures:
            raise next((failure for failure in failures if isinstance(failure, CorruptShard)), failures[0])

    async def _bring(self, shard: Shard, place: Place) -> None:
        try:
            sent = await replicate(
                self._gang_id,
                self._node,
                shard,
                self._stub(place.holder),
                self._transport,
                lambda size, seconds: self.transfer_rates.note(place.holder, size, seconds),
                place,
            )
        except (ReplicaRefused, grpc.aio.AioRpcError) as error:
            self.refusals.note(place.holder, _why(error))
            raise
        self.refusals.end(place.holder)
        log.debug("rank %d's shard of %s is on %s, %d bytes sent", shard.rank, shard.version, place.holder, sent)

    async def _report(self, version: Version, *, skipped: bool) -> None:
        """Tell the commit leader that this node has stored or skipped a version; retry until the leader has it."""
        leader = next((place.node for place in self.order.places if place.rank == 0), self._node)
        replicas = {} if skipped else self._replica_digests(version)
        if leader == self._node:
            self._slot_bytes = max(self._slot_bytes, self._largest_slot(version))
            self._record_report(self._node, version, skipped, replicas)
            return
        report = peer_pb2.StoredReport(
            gang_id=self._gang_id,
            node=self._node,
            version=version.to_wire(),
            skipped=skipped,
            slot_bytes=self._largest_slot(version),
            stall_us=round(self._stalls.get(version, 0.0) * 1e6),
        )
        for rank, replica in replicas.items():
            report.replicas.add(rank=rank, group=replica.group, digest=replica.digest)
        for delay in _retry_delays():
            try:
                ack = await self._stub(leader).Stored(report, timeout=REPORT_TIMEOUT_S)
                refused = ack.refused
            except (ReplicaRefused, grpc.aio.AioRpcError) as error:
                refused = _why(error)
            if not refused or self.stale_reason(version):
                self.refusals.end(leader)
                return
            self.refusals.note(leader, refused)
            # A commit leader that has not received its order yet refuses too.
            log.info("the commit leader %s refused the report of %s: %s", leader, version, refused)
            await asyncio.sleep(delay)

    def _replica_digests(self, version: Version) -> ReplicaDigests:
        """What the ranks of this node have written of the state that they share with other ranks."""
        shards = (self._shard_store.slot_shard(rank, version) for rank in self.local_ranks)
        return {shard.rank: shard.replica for shard in shards if shard is not None and shard.replica.group}

    def _largest_slot(self, version: Version) -> int:
        shards = (self._shard_store.slot_shard(rank, version) for rank in self.local_ranks)
        return max((shard.bytes for shard in shards if shard is not None), default=0)

    # The commit leader.

    def receive_report(self, request: peer_pb2.StoredReport) -> str:
        """Record a node's report; returns why the report is refused, empty if it is not."""
        version = Version.from_wire(request.version)
        if request.gang_id != self._gang_id or version.generation != self._tracker.generation:
            return f"{self._node} tracks generation {self._tracker.generation} of gang {self._gang_id}"
        if version.generation <= self.fenced_generation:
            return f"{self._node} has fenced generation {self.fenced_generation}"
        replicas = {replica.rank: ReplicaDigest(replica.group, replica.digest) for replica in request.replicas}
        self._slot_bytes = max(self._slot_bytes, request.slot_bytes)
        self._note_stall(version, request.stall_us / 1e6)
        self._record_report(request.node, version, request.skipped, replicas)
        return ""

    def _note_stall(self, version: Version, stall_s: float) -> None:
        if version > self.committed:
            self._stalls[version] = max(stall_s, self._stalls.get(version, 0.0))

    def _record_report(self, node: str, version: Version, skipped: bool, replicas: ReplicaDigests) -> None:
        if skipped:
            decision = self._tracker.record_skipped(node, version, self._passed_step())
        else:
            decision = self._tracker.record_stored(node, version, self._passed_step(), replicas)
        if decision is None:
            return
        self._note_disagreement(decision)
        if not decision.void:
            self.costs.note_committed(self._stalls.get(version, 0.0))
        for member in self._peer_addresses:
            self._spawn(version.generation, self._announce(member, decision))
        self._apply_decision(decision)

    def _note_disagreement(self, decision: CommitDecision) -> None:
        found = decision.disagreement
        if found is None or self.disagreement is not None:
            return
        log.error("replicas disagree at %s: %s", decision.version, found)
        self.disagreement = ReplicaDisagreement(
            version=decision.version.to_wire(), ranks=found.ranks, majority=found.majority, replicas=found.replicas
        )

    async def _announce(self, node: str, decision: CommitDecision) -> None:
        """Send a decision until the node has it: the node's ranks keep no further step without the decision."""
        if node == self._node:
            return
        notice = peer_pb2.CommitNotice(
            gang_id=self._gang_id,
            node=self._node,
            version=decision.version.to_wire(),
            void=decision.void,
            next_step=decision.next_step,
            committed=decision.committed.to_wire(),
            slot_bytes=self._slot_bytes,
            ranks_per_node=self._ranks_per_node,
        )
        for delay in _retry_delays():
            try:
                await self._stub(node).Committed(notice, timeout=REPORT_TIMEOUT_S)
                break
            except (ReplicaRefused, grpc.aio.AioRpcError) as error:
                self.refusals.note(node, _why(error))
                log.info("%s did not receive the decision about %s: %s", node, decision.version, _why(error))
            await asyncio.sleep(delay)
            if self._tracker.next_step > decision.next_step or decision.version.generation <= self.fenced_generation:
                break
        self.refusals.end(node)

    # Every agent.

    def receive_decision(self, request: peer_pb2.CommitNotice) -> str:
        """Apply the leader's decision; returns why the decision is refused, empty if it is not."""
        version = Version.from_wire(request.version)
        if request.gang_id != self._gang_id or version.generation <= self.fenced_generation:
            return f"{self._node} has fenced generation {self.fenced_generation} of gang {self._gang_id}"
        committed = Version.from_wire(request.committed)
        self._apply_decision(CommitDecision(version, request.void, request.next_step, committed))
        if request.slot_bytes and not self.local_ranks:
            self._reserve(request.slot_bytes, request.ranks_per_node)
        return ""

    def _apply_decision(self, decision: CommitDecision) -> None:
        version = decision.version
        self.refusals.clear()
        if version.generation == self.order.generation and decision.next_step > self.next_step:
            self.next_step = decision.next_step
            self._answered_ranks.clear()
        if decision.committed > self.committed:
            self._commit(decision.committed)
        if decision.void and version > self._void:
            self._void = version
            self._shard_store.drop_versions(self._is_void, "it is void")
        self._on_decision()

    def _commit(self, version: Version) -> None:
        self.committed = version
        # The task would hold a slot that is about to be written again.
        self._cancel_restored_version_task()
        self._shard_store.drop_versions(lambda older: older < version, "a newer version is committed")
        self._replicated_ranks = {newer: ranks for newer, ranks in self._replicated_ranks.items() if newer > version}
        self._stalls = {newer: stall_s for newer, stall_s in self._stalls.items() if newer > version}

    def _stub(self, node: str) -> "PeerServiceAsyncStub":
        if node not in self._peer_addresses:
            raise ReplicaRefused(f"the order names no address for {node}")
        return self._dial(node, self._peer_addresses[node])


def _why(error: ReplicaRefused | grpc.aio.AioRpcError) -> str:
    return error.details() or str(error) if isinstance(error, grpc.aio.AioRpcError) else str(error)


def _retry_delays() -> Iterator[float]:
    """Seconds between attempts, without end."""
    yield from RETRY_DELAYS_S
    while True:
        yield RETRY_DELAYS_S[-1]
