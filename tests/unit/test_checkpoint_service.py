"""The checkpoint services of several nodes, joined by gRPC on loopback, with ranks that write bytes, not tensors."""

import asyncio
import itertools
import json
import os
import pickle
import random
import re
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache
from pathlib import Path

import grpc
import pytest

from muster.checkpoint.durable.newest import finished_steps_of, newest_checkpoint
from muster.checkpoint.durable.posix_folder import PosixFile, PosixFolder
from muster.checkpoint.durable.trusted_folder import TrustedFolder
from muster.checkpoint.format import durable_folders, layout
from muster.checkpoint.format.errors import FlushError, RestoreError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.checkpoint_service import CheckpointService
from muster.checkpoint.store.flush import flush_part, flush_version
from muster.checkpoint.store.flush.give_up import FlushCancellation
from muster.checkpoint.store.memory.pieces import Piece, digest_of, shard_digest
from muster.checkpoint.store.replication import transfer_rates
from muster.checkpoint.store.streams.stream_sockets import CHANGED, INTACT, REQUEST, TOKEN_BYTES
from muster.checkpoint.testing.gang_in_one_process import (
    InProcessGang,
    TorchlessRank,
    contents,
    durable_metadata_of,
    reported,
)
from muster.checkpoint.testing.no_transport import NoTransport
from muster.checkpoint.training.agent_connection import AgentConnection, StartPoint
from muster.v1 import agent_pb2, common_pb2, peer_pb2
from muster.v1.agent_pb2 import BlockTimes
from muster.v1.rank_pb2 import StepTime

SHARED = (9 << 20) + 77
"""Bytes: three pieces, of which tests name the second and the last."""
GANG = "g1"


class Gang(InProcessGang):
    """A gang in one process with its ranks."""

    def __init__(self, gang_id: str = GANG) -> None:
        super().__init__(gang_id)
        self.ranks: dict[int, TorchlessRank] = {}
        self.serial = 0

    async def run(
        self, places: dict[int, str], restore: agent_pb2.RestorePlan | None = None, size: int = SHARED
    ) -> dict[int, StartPoint]:
        """Start a generation and let every rank join. With a `size`, every rank gets slots too."""
        for rank in self.ranks.values():
            rank.connection.close()
        self.begin(places, restore)
        body = durable_metadata_of(places)
        self.ranks, starts = {}, {}
        for rank, name in places.items():
            connection = AgentConnection(self.socket(rank, name), rank, self.generation)
            self.ranks[rank] = TorchlessRank(connection, rank, len(places), b"" if rank else body)
        for rank, one in self.ranks.items():
            starts[rank] = await asyncio.to_thread(one.join)
        if size:
            for one in self.ranks.values():
                assert not await asyncio.to_thread(one.layout, size)
        return starts

    async def step(self, step: int, shared: Callable[[int], bytes]) -> None:
        """All ranks finish a step and keep it."""
        for rank, one in self.ranks.items():
            assert await asyncio.to_thread(one.step, step, shared(rank), own(rank, step), 5.0)

    async def step_without_wait(self, step: int, shared: Callable[[int], bytes], skip: tuple[int, ...] = ()) -> None:
        """All ranks finish a step. They keep it if it is the step to keep next; ranks in `skip` have no slot for it."""
        for rank, one in self.ranks.items():
            if rank in skip:
                one.connection.report_progress(step, skipped=True)
            else:
                await asyncio.to_thread(one.step, step, shared(rank), own(rank, step))

    async def committed(self, version: Version) -> None:
        await until(lambda: all(n.committed() == version for n in self.nodes.values()))


def own(rank: int, step: int) -> bytes:
    return f"rank {rank} step {step}".encode()


@lru_cache(64)
def _bytes(seed: int) -> bytes:
    """Random bytes: no two pieces are equal."""
    return random.Random(seed).randbytes(SHARED)


def replica(step: int) -> Callable[[int], bytes]:
    """All ranks hold the same bytes at this step."""
    return lambda _: _bytes(step)


def sharded(step: int) -> Callable[[int], bytes]:
    """Every rank holds different bytes at this step."""
    return lambda rank: _bytes(1000 + step * 16 + rank)


def small(rank: int) -> bytes:
    """1 MiB that differs from rank to rank, so that a flush is short."""
    return bytes([rank]) * (1 << 20)


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < end, f"not within {timeout_s} s"
        await asyncio.sleep(0.002)


@asynccontextmanager
async def running_gang(gang_id: str = GANG) -> AsyncIterator[Gang]:
    gang = Gang(gang_id)
    try:
        yield gang
    finally:
        for rank in gang.ranks.values():
            rank.connection.close()
        await gang.close()


@pytest.fixture
async def gang() -> AsyncIterator[Gang]:
    async with running_gang() as gang:
        yield gang


def held(gang: Gang, node: str) -> set[tuple[int, int, int, int]]:
    """(tier, rank, generation, step) of every shard on a node."""
    shards = gang.nodes[node].checkpoint_service.shards()
    return {(s.tier, s.rank, s.version.generation, s.version.step) for s in shards}


OWN, BUDDY = agent_pb2.TIER_OWN, agent_pb2.TIER_BUDDY
FOUR = {0: "n0", 1: "n1", 2: "n2", 3: "n3"}


async def test_a_new_gang_starts_from_step_0(gang: Gang) -> None:
    await gang.add("n0", "n1")
    starts = await gang.run({0: "n0", 1: "n1"})
    assert starts == {0: StartPoint(), 1: StartPoint()}


async def test_a_step_is_committed_when_every_shard_has_a_replica(gang: Gang) -> None:
    await gang.add(*FOUR.values())
    await gang.run(FOUR)
    await gang.step(1, sharded(1))
    await gang.committed(Version(1, 1))
    assert held(gang, "n1") == {(OWN, 1, 1, 1), (BUDDY, 0, 1, 1)}
    for step in (2, 3, 4):
        await gang.step(step, sharded(step))
        await gang.committed(Version(1, step))
    assert held(gang, "n1") == {(OWN, 1, 1, 4), (BUDDY, 0, 1, 4)}
    assert gang.nodes["n2"].checkpoint_service.progress() == {2: 4}


async def test_a_flipped_bit_in_one_of_four_replicas_is_found_at_the_next_snapshot(gang: Gang) -> None:
    await gang.add(*FOUR.values())
    await gang.run(FOUR, size=0)
    for rank in gang.ranks.values():
        rank.replica_group = 7
        assert not await asyncio.to_thread(rank.layout, SHARED)
    await gang.step(1, replica(1))
    await gang.committed(Version(1, 1))
    leader = gang.nodes["n0"].checkpoint_service
    assert leader.disagreement() is None

    def flipped(rank: int) -> bytes:
        data = bytearray(_bytes(2))
        data[5 << 20] ^= rank == 2
        return bytes(data)

    await gang.step(2, flipped)
    await until(lambda: leader.disagreement() is not None)
    assert leader.disagreement() == agent_pb2.ReplicaDisagreement(
        version=common_pb2.Version(generation=1, step=2), ranks=[2], majority=True, replicas=4
    )
    await until(lambda: all(held(gang, f"n{n}") == {(OWN, n, 1, 1), (BUDDY, (n + 3) % 4, 1, 1)} for n in range(4)))
    assert all(node.committed() == Version(1, 1) for node in gang.nodes.values())
    assert gang.nodes["n1"].checkpoint_service.disagreement() is None, "the commit leader alone compares"


async def compare_from_the_first_snapshot(gang: Gang) -> None:
    """Two ranks of one replica group write different bytes at once."""
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"}, size=0)
    for rank in gang.ranks.values():
        rank.replica_group = 7
        assert not await asyncio.to_thread(rank.layout, SHARED)
    await gang.step(1, sharded(1))


async def test_replicas_that_have_never_agreed_are_committed(gang: Gang) -> None:
    await compare_from_the_first_snapshot(gang)
    await gang.committed(Version(1, 1))


async def test_replicas_that_agreed_in_an_earlier_generation_must_agree_from_the_first_snapshot_on(gang: Gang) -> None:
    gang.agreed_groups = (7,)
    await compare_from_the_first_snapshot(gang)
    leader = gang.nodes["n0"].checkpoint_service
    await until(lambda: leader.disagreement() is not None)
    assert leader.committed() == common_pb2.Version()


async def test_replicas_of_a_script_that_lets_them_differ_are_committed(gang: Gang) -> None:
    gang.agreed_groups, gang.replicas_differ = (7,), True
    await compare_from_the_first_snapshot(gang)
    await gang.committed(Version(1, 1))


async def test_the_comparison_ends_within_a_generation_when_an_order_says_so(gang: Gang) -> None:
    gang.agreed_groups = (7,)
    await compare_from_the_first_snapshot(gang)
    await until(lambda: gang.nodes["n0"].checkpoint_service.disagreement() is not None)
    gang.replicas_differ = True
    for node in gang.nodes.values():
        node.checkpoint_service.apply_order(gang._order({0: "n0", 1: "n1"}, None))
    await gang.step(2, sharded(2))
    await gang.committed(Version(1, 2))


async def test_own_bytes_of_a_rank_are_not_compared(gang: Gang) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    for step in (1, 2):
        await gang.step(step, sharded(step) if step == 2 else replica(step))  # without a replica group
        await gang.committed(Version(1, step))
    assert gang.nodes["n0"].checkpoint_service.disagreement() is None


async def test_both_copies_of_a_shard_report_one_replica_digest(gang: Gang) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"}, size=0)
    for rank in gang.ranks.values():
        rank.replica_group = 7
        assert not await asyncio.to_thread(rank.layout, SHARED)
    await gang.step(1, replica(1))
    await gang.committed(Version(1, 1))
    shards = [shard for node in gang.nodes.values() for shard in node.checkpoint_service.shards()]
    assert {(shard.replica_group, shard.replica_digest) for shard in shards} == {(7, shards[0].replica_digest)}
    assert len(shards) == 4


async def test_the_first_value_that_is_not_finite_is_reported(gang: Gang) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    checkpoint_service = gang.nodes["n1"].checkpoint_service
    gang.ranks[1].connection.report_not_finite(3, "loss = nan")
    gang.ranks[1].connection.report_not_finite(4, "loss = inf")
    gang.ranks[1].connection.report_progress(4)
    await until(lambda: checkpoint_service.progress() == {1: 4})
    assert reported(checkpoint_service, 1).not_finite == agent_pb2.NotFinite(step=3, words="loss = nan")
    await gang.run({0: "n0", 1: "n1"})
    assert not reported(checkpoint_service, 1).HasField("not_finite")


async def test_step_times_are_reported_in_blocks_until_the_next_generation_begins(gang: Gang) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    checkpoint_service = gang.nodes["n1"].checkpoint_service
    for step in (1, 2, 3, 4):
        times = StepTime(step=step, compute_us=1000 * step, wait_us=step)
        gang.ranks[1].connection.report_progress(step, step_times=[times])
    await until(lambda: checkpoint_service.progress() == {1: 4})
    times = BlockTimes(first_block=0, compute_us=[2500], wait_us=[2])
    assert reported(checkpoint_service, 1).block_times == times
    assert not reported(gang.nodes["n0"].checkpoint_service, 1).HasField("block_times")
    await gang.run({0: "n0", 1: "n1"})
    assert not reported(checkpoint_service, 1).HasField("block_times")


async def test_a_declared_phase_lasts_until_it_is_over_or_the_next_generation_begins(gang: Gang) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    checkpoint_service = gang.nodes["n1"].checkpoint_service
    gang.ranks[1].connection.declare_phase("e" * 100)
    await until(lambda: reported(checkpoint_service, 1).declared_phase == "e" * 64)
    assert not reported(gang.nodes["n0"].checkpoint_service, 1).declared_phase
    gang.ranks[1].connection.declare_phase("")
    await until(lambda: reported(checkpoint_service, 1).declared_phase == "")
    gang.ranks[1].connection.declare_phase("evaluation")
    await until(lambda: reported(checkpoint_service, 1).declared_phase == "evaluation")
    await gang.run({0: "n0", 1: "n1"})
    assert not reported(checkpoint_service, 1).declared_phase


async def test_data_parallel_ranks_send_only_their_own_objects(gang: Gang) -> None:
    gang.slot_wait_s = 60.0  # however busy the machine is, the slots are filled before
    await gang.add(*FOUR.values())
    await gang.run(FOUR)
    for step in range(1, 5):
        await gang.step(step, replica(step))
        await gang.committed(Version(1, step))
    sent = [n.received_bytes for n in gang.nodes.values()]
    assert 0 < max(sent) < 5 * (1 << 17), sent
    assert not any(n.transport.fetches for n in gang.nodes.values()), "small pieces travel inside the offer"
    assert not any(n.checkpoint_service.transfers() for n in gang.nodes.values())


async def test_shards_that_differ_are_sent_whole(gang: Gang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_rates, "LEAST_BYTES", SHARED)
    await gang.add(*FOUR.values())
    await gang.run(FOUR)
    await gang.step(1, sharded(1))
    await gang.committed(Version(1, 1))
    assert all(n.received_bytes > SHARED for n in gang.nodes.values())
    for node in gang.nodes.values():
        (copy,) = node.checkpoint_service.transfers()
        assert copy.bytes >= SHARED
        assert copy.seconds > 0
        assert copy.number == 1


async def test_one_node_commits_alone(gang: Gang) -> None:
    await gang.add("n0")
    await gang.run({0: "n0", 1: "n0"})
    await gang.step(1, replica(1))
    await gang.committed(Version(1, 1))
    assert held(gang, "n0") == {(OWN, 0, 1, 1), (OWN, 1, 1, 1)}


async def test_a_slot_is_free_again_only_after_a_newer_commit(gang: Gang) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    first, second = gang.ranks[0], gang.ranks[1]
    await asyncio.to_thread(first.step, 1, replica(1)(0), own(0, 1), 5.0)
    await until(lambda: (OWN, 0, 1, 1) in held(gang, "n0"))
    assert first.connection.slot_for_any_step(2, 0) is None, "no second slot before step 1 is decided"
    await asyncio.to_thread(second.step, 1, replica(1)(1), own(1, 1), 5.0)
    await gang.committed(Version(1, 1))
    await asyncio.to_thread(first.step, 2, replica(2)(0), own(0, 2), 5.0)
    await until(lambda: (OWN, 0, 1, 2) in held(gang, "n0"))
    assert first.connection.slot_for_any_step(3, 0) is None, "step 1 is committed and must be kept"
    assert (OWN, 0, 1, 1) in held(gang, "n0")
    await asyncio.to_thread(second.step, 2, replica(2)(1), own(1, 2), 5.0)
    await gang.committed(Version(1, 2))
    assert await asyncio.to_thread(first.connection.slot_for_any_step, 3, 5.0) is not None


@pytest.mark.parametrize("late", [0, 3])
async def test_steps_that_a_rank_misses_are_void_and_stop_no_commits(gang: Gang, late: int) -> None:
    await gang.add(*FOUR.values())
    await gang.run(FOUR)
    await gang.step(1, replica(1))
    await gang.committed(Version(1, 1))
    for step in range(2, 8):
        await gang.step_without_wait(step, replica(step), skip=(late,))
    assert gang.nodes["n1"].checkpoint_service.committed().step == 1
    step = 8
    while gang.nodes["n1"].checkpoint_service.committed().step == 1:
        await gang.step_without_wait(step, replica(step))
        step += 1
        assert step < 1000
    await gang.step(step, replica(step))
    await gang.committed(Version(1, step))
    assert {h[3] for node in gang.nodes for h in held(gang, node)} == {step}


async def test_a_rank_that_skips_a_step_after_the_one_to_keep_stops_no_commits(gang: Gang) -> None:
    places = {0: "n0", 1: "n1", 2: "n2"}
    await gang.add(*places.values())
    await gang.run(places)
    gang.nodes["n1"].peer_service.drops_decisions = True
    await gang.step(1, replica(1))
    await until(lambda: all(gang.nodes[n].committed() == Version(1, 1) for n in ("n0", "n2")))
    await gang.step_without_wait(2, replica(2), skip=(1,))
    # n0 holds the replica of rank 2 at step 2, which refers to pieces in the slot of rank 0.
    await until(lambda: {(OWN, 0, 1, 2), (BUDDY, 2, 1, 2)} <= held(gang, "n0"))
    gang.nodes["n1"].peer_service.drops_decisions = False
    await until(lambda: gang.nodes["n1"].committed() == Version(1, 1))
    gang.ranks[1].connection.report_progress(3, skipped=True)
    await until(lambda: held(gang, "n0") == {(OWN, 0, 1, 1), (BUDDY, 2, 1, 1)})
    step = 3
    while min(n.checkpoint_service.committed().step for n in gang.nodes.values()) == 1:
        step += 1
        assert step < 1000, "no step is committed any more"
        await gang.step_without_wait(step, replica(step % 8))


async def test_the_last_step_is_kept_although_a_rank_has_missed_an_earlier_one(gang: Gang) -> None:
    """A slot for step 2 reaches its rank after that step. The rank keeps its last step in this slot."""
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    await gang.step(1, replica(1))
    await gang.committed(Version(1, 1))
    first, second = gang.ranks[0], gang.ranks[1]
    await until(lambda: first.connection.slot_for_scheduled_step(2) is not None)
    assert await asyncio.to_thread(first.step, 2, replica(2)(0), own(0, 2))
    last = [asyncio.to_thread(one.step, 3, replica(3)(r), own(r, 3), 10.0) for r, one in ((0, first), (1, second))]
    assert await asyncio.gather(*last) == [True, True]
    await gang.committed(Version(1, 3))


async def test_a_rank_that_asks_for_other_slots_after_a_skipped_step_holds_nobody_up(gang: Gang) -> None:
    """Rank 1 skips step 2 before its agent hears that this is the one to keep, and its new slots are for any step."""
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    gang.nodes["n1"].peer_service.drops_decisions = True
    await gang.step(1, replica(1))
    first, second = gang.ranks[0], gang.ranks[1]
    await until(lambda: first.connection.slot_for_scheduled_step(2) is not None)
    assert await asyncio.to_thread(first.step, 2, replica(2)(0), own(0, 2))
    second.connection.report_progress(2, skipped=True)
    gang.nodes["n1"].peer_service.drops_decisions = False
    await until(lambda: gang.nodes["n1"].committed() == Version(1, 1))
    assert await asyncio.to_thread(second.layout, len(replica(3)(1)), 1 << 17) == ""
    last = [asyncio.to_thread(one.step, 3, replica(3)(r), own(r, 3), 10.0) for r, one in ((0, first), (1, second))]
    assert await asyncio.gather(*last) == [True, True]
    await gang.committed(Version(1, 3))


async def test_steps_faster_than_commits_are_kept_as_often_as_commits_allow(gang: Gang) -> None:
    await gang.add(*FOUR.values())
    await gang.run(FOUR, size=1 << 20)
    kept: set[int] = set()
    step = 0
    while len(kept) <= 5:
        step += 1
        await gang.step_without_wait(step, lambda rank, step=step: bytes([step % 256]) * (1 << 20))
        kept.add(gang.nodes["n3"].checkpoint_service.committed().step)
        assert step < 5000, kept


async def test_ranks_that_wait_for_the_previous_commit_keep_every_step(gang: Gang) -> None:
    await gang.add(*FOUR.values())
    await gang.run(FOUR)
    await gang.step(1, replica(1))
    for step in range(2, 30):
        kept = await asyncio.gather(
            *(
                asyncio.to_thread(one.step, step, replica(step % 8)(rank), own(rank, step), 10.0, scheduled=True)
                for rank, one in gang.ranks.items()
            )
        )
        assert all(kept), step
        assert gang.nodes["n0"].checkpoint_service.committed().step >= step - 1
    await gang.committed(Version(1, 29))


async def test_the_wait_for_a_commit_is_limited(gang: Gang) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    gang.nodes["n1"].transport.flows.clear()
    for rank, one in gang.ranks.items():
        assert await asyncio.to_thread(one.step, 1, sharded(1)(rank), own(rank, 1), 5.0)
    first = gang.ranks[0]
    assert not await asyncio.to_thread(first.step, 2, sharded(2)(0), own(0, 2), 0.02, scheduled=True)
    gang.nodes["n1"].transport.flows.set()
    await gang.committed(Version(1, 1))
    # A rank that still waited at step 2 would be told to keep it. Rank 0 has gone on, so a later step is named.
    assert await asyncio.to_thread(first.step, 3, sharded(3)(0), own(0, 3), 5.0, scheduled=True)


async def test_a_commit_decision_is_sent_until_it_is_received(gang: Gang) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    await gang.step(1, replica(1))
    await gang.committed(Version(1, 1))
    gang.nodes["n1"].peer_service.drops_decisions = True
    await gang.step(2, replica(2))
    await until(lambda: gang.nodes["n0"].checkpoint_service.committed().step == 2)
    for step in range(3, 6):
        await gang.step_without_wait(step, replica(step))
    assert gang.nodes["n1"].checkpoint_service.committed().step == 1
    gang.nodes["n1"].peer_service.drops_decisions = False
    step = 6
    while gang.nodes["n1"].checkpoint_service.committed().step < 6:
        await gang.step_without_wait(step, replica(step))
        step += 1
        assert step < 1000


async def test_slots_are_refused_with_the_reason_where_memory_checkpoints_are_off(gang: Gang) -> None:
    checkpoint_service = CheckpointService(GANG, "alone", gang.dial, NoTransport(), lambda: None, "job.toml says so")
    checkpoint_service.apply_order(
        agent_pb2.Order(duty=agent_pb2.DUTY_RUN, generation=1, places=[agent_pb2.RankPlace(rank=0, node="alone")])
    )
    connection = AgentConnection(checkpoint_service.rank_socket(0, 1).detach(), 0, 1)
    rank = TorchlessRank(connection, 0, 1)
    assert await asyncio.to_thread(rank.join) == StartPoint()
    assert await asyncio.to_thread(rank.layout, SHARED) == "job.toml says so"
    assert connection.slot_for_any_step(1, 0) is None
    connection.close()
    await checkpoint_service.close()


async def test_a_rank_that_reports_a_wrong_or_broken_slot_is_ignored(gang: Gang) -> None:
    await gang.add("n0")
    await gang.run({0: "n0"})
    connection = gang.ranks[0].connection
    connection.report_filled(7, 1)
    slot = connection.slot_for_any_step(1, 5.0)
    assert slot is not None
    connection.slots[slot][-64:] = bytes(64)
    connection.report_filled(slot, 1)
    await gang.step(2, replica(2))
    await gang.committed(Version(1, 2))
    assert held(gang, "n0") == {(OWN, 0, 1, 2)}


async def test_ranks_are_restored_on_their_own_nodes(gang: Gang) -> None:
    await gang.add(*FOUR.values())
    await gang.run(FOUR)
    for step in (1, 2):
        await gang.step(step, sharded(step))
        await gang.committed(Version(1, step))
    starts = await gang.run(FOUR, gang.plan(Version(1, 2)))
    for rank, start in starts.items():
        assert (start.step, start.generation) == (2, 1)
        assert start.shard is not None
        assert contents(start.shard)["own"] == own(rank, 2)
        assert contents(start.shard)["shared"].startswith(sharded(2)(rank))
    await gang.step(3, sharded(3))
    await gang.committed(Version(2, 3))
    assert {h[2:] for node in gang.nodes for h in held(gang, node)} == {(2, 3)}


async def test_a_lost_nodes_rank_is_restored_on_a_spare_from_its_buddy(gang: Gang) -> None:
    await gang.add(*FOUR.values(), "spare")
    await gang.run(FOUR)
    for step in (1, 2):
        await gang.step(step, replica(step))
        await gang.committed(Version(1, step))
    await gang.lose("n0")
    places = {**FOUR, 0: "spare"}
    starts = await gang.run(places, gang.plan(Version(1, 2)))
    assert starts[0].shard is not None
    assert contents(starts[0].shard) == {
        "shared": replica(2)(0).ljust(layout.align_up(SHARED), b"\0"),
        "own": own(0, 2),
    }
    assert (OWN, 0, 1, 2) in held(gang, "spare")
    for step in (3, 4, 5):
        await gang.step(step, replica(step))
        await gang.committed(Version(2, step))


async def test_further_ranks_start_from_the_state_of_those_that_wrote_it(gang: Gang) -> None:
    """And rank 3 does so on the node of rank 0, without the network."""
    await gang.add("n0", "n1", "spare")
    await gang.run({0: "n0", 1: "n1"})
    for step in (1, 2):
        await gang.step(step, replica(step))
        await gang.committed(Version(1, step))
    plan = gang.plan(Version(1, 2))
    plan.written_ranks = 2
    places = {0: "n0", 1: "n1", 2: "spare", 3: "n1"}
    starts = await gang.run(places, plan)
    shared = replica(2)(0).ljust(layout.align_up(SHARED), b"\0")
    for rank, source in ((0, 0), (1, 1), (2, 0), (3, 1)):
        shard = starts[rank].shard
        assert shard is not None
        assert contents(shard) == {"shared": shared, "own": own(source, 2)}
    for step in (3, 4, 5):
        await gang.step(step, replica(step))
        await gang.committed(Version(2, step))
    assert {h[2:] for node in gang.nodes for h in held(gang, node)} == {(2, 5)}


async def test_a_further_rank_is_not_restored_where_no_plan_says_that_it_is_one(gang: Gang) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0"})
    await gang.step(1, replica(1))
    await gang.committed(Version(1, 1))
    with pytest.raises(RestoreError, match="rank 1's state at step 1 of generation 1 can't be had: no source holds it"):
        await gang.run({0: "n0", 1: "n1"}, gang.plan(Version(1, 1)))


@pytest.mark.parametrize("shared", [replica, sharded])
async def test_shards_without_a_replica_after_a_swap_are_replicated_before_the_next_commit(
    gang: Gang, shared: Callable[[int], Callable[[int], bytes]]
) -> None:
    await gang.add("n0", "n1", "n2", "n1-spare")
    places = {0: "n0", 1: "n1", 2: "n2"}
    await gang.run(places)
    await gang.step(1, shared(1))
    await gang.committed(Version(1, 1))
    await gang.lose("n1")
    moved = {**places, 1: "n1-spare"}
    await gang.run(moved, gang.plan(Version(1, 1)))
    before = {name: node.received_bytes for name, node in gang.nodes.items()}
    fetches = {name: node.transport.fetches for name, node in gang.nodes.items()}
    for rank in gang.ranks.values():
        rank.connection.report_progress(2)  # no snapshot follows
    await until(lambda: (BUDDY, 0, 1, 1) in held(gang, "n1-spare"))
    # The replicas of the two other ranks are where they were. Data-parallel ranks send only their own objects.
    sends_whole_shards = gang.nodes["n1-spare"].received_bytes - before["n1-spare"] > 1 << 20
    assert sends_whole_shards == (shared is sharded)
    began = {name: node.transport.fetches - fetches[name] for name, node in gang.nodes.items()}
    assert began == {"n0": 0, "n2": 0, "n1-spare": sends_whole_shards}
    assert gang.nodes["n0"].received_bytes - before["n0"] < 1 << 18
    await gang.lose("n0")
    starts = await gang.run({**moved, 0: "n2"}, gang.plan(Version(1, 1)))
    for rank, start in starts.items():
        assert start.shard is not None
        assert contents(start.shard)["own"] == own(rank, 1)
        assert contents(start.shard)["shared"].startswith(shared(1)(rank))
    for step in (3, 4):
        await gang.step(step, shared(step))
        await gang.committed(Version(3, step))
    assert {h[2:] for node in gang.nodes for h in held(gang, node)} == {(3, 4)}


async def test_states_committed_without_a_buddy_have_replicas_soon_after_a_node_has_joined(gang: Gang) -> None:
    alone = {0: "n0", 1: "n0"}
    await gang.add("n0")
    await gang.run(alone)
    await gang.step(1, sharded(1))
    await gang.committed(Version(1, 1))
    assert held(gang, "n0") == {(OWN, 0, 1, 1), (OWN, 1, 1, 1)}, "one node has no buddy"
    await gang.add("joined")
    await gang.run({0: "n0", 1: "joined"}, gang.plan(Version(1, 1)))
    for rank in gang.ranks.values():
        rank.connection.report_progress(2)  # no snapshot follows
    await until(lambda: (BUDDY, 0, 1, 1) in held(gang, "joined") and (BUDDY, 1, 1, 1) in held(gang, "n0"))
    await gang.lose("n0")
    starts = await gang.run({0: "joined", 1: "joined"}, gang.plan(Version(1, 1)), size=0)
    for rank, start in starts.items():
        assert start.shard is not None
        assert contents(start.shard)["shared"].startswith(sharded(1)(rank))


async def test_a_node_replicates_the_restored_version_after_the_first_step_of_its_ranks(gang: Gang) -> None:
    await gang.add(*FOUR.values(), "x1", "x3")
    await gang.run(FOUR, size=1 << 20)
    await gang.step(1, small)
    await gang.committed(Version(1, 1))
    # The ring is n0, n2, x1, x3 now.
    await gang.run({0: "n0", 1: "x1", 2: "n2", 3: "x3"}, gang.plan(Version(1, 1)), size=1 << 20)
    gang.ranks[0].connection.report_progress(2)
    await until(lambda: (BUDDY, 0, 1, 1) in held(gang, "n2"))
    assert (BUDDY, 2, 1, 1) not in held(gang, "x1")
    gang.ranks[2].connection.report_progress(2)
    await until(lambda: (BUDDY, 2, 1, 1) in held(gang, "x1"))
    assert (BUDDY, 1, 1, 1) not in held(gang, "x3")


async def test_a_commit_cancels_the_replication_of_the_restored_version(gang: Gang) -> None:
    await gang.add("n0", "n1", "spare")
    await gang.run({0: "n0", 1: "n1"})
    await gang.step(1, sharded(1))
    await gang.committed(Version(1, 1))
    await gang.lose("n1")
    await gang.run({0: "n0", 1: "spare"}, gang.plan(Version(1, 1)))
    spare = gang.nodes["spare"].transport
    spare.flows.clear()
    for rank in gang.ranks.values():
        rank.connection.report_progress(2)
    await until(lambda: spare.fetches == 2)
    checkpoint_service = gang.nodes["n0"].checkpoint_service
    version = Version(2, 3).to_wire()
    notice = peer_pb2.CommitNotice(gang_id=GANG, node="n0", version=version, next_step=4, committed=version)
    await gang.dial("n0", gang.nodes["n0"].address).Committed(notice)
    await until(lambda: spare.cancelled == 1)
    assert Version.from_wire(checkpoint_service.committed()) == Version(2, 3)


async def test_a_node_without_ranks_keeps_memory_ready_for_those_that_may_come(gang: Gang) -> None:
    def ready(node: str) -> int:
        return gang.nodes[node].checkpoint_service.reserved_bytes()

    await gang.add("n0", "n1", "spare")
    await gang.run({0: "n0", 1: "n1", 2: "n1"})
    slot_bytes = max(rank.slot_bytes for rank in gang.ranks.values())
    await gang.step(1, replica(1))
    await until(lambda: ready("spare") == 4 * slot_bytes)  # n1 has two ranks with two slots each
    assert ready("n0") == ready("n1") == 0
    await gang.lose("n0")
    (start, *_) = (await gang.run({0: "spare", 1: "n1", 2: "n1"}, gang.plan(Version(1, 1)))).values()
    assert start.shard is not None
    assert contents(start.shard)["own"] == own(0, 1)
    await until(lambda: ready("spare") == 0)  # rank 0 has its slots


async def test_replica_memory_is_kept_only_for_ranks_whose_buddy_the_node_is(gang: Gang) -> None:
    def replica_memfds() -> int:
        return len(re.findall(r"memfd:muster-g1-r\d+-b", Path("/proc/self/maps").read_text()))

    await gang.add("n0", "n1", "n2", "n3", "n4", "n5")
    step = 0
    for places in ({0: "n0", 1: "n1", 2: "n2"}, {0: "n3", 1: "n4", 2: "n5"}, {0: "n0", 1: "n3", 2: "n5"}):
        newest = gang.newest(3)
        await gang.run(places, gang.plan(newest) if newest else None, size=1 << 20)
        for _ in range(3):
            step += 1
            await gang.step(step, small)
            await gang.committed(Version(gang.generation, step))
    assert replica_memfds() <= 2 * 3


async def test_two_ranks_of_a_node_move_together(gang: Gang) -> None:
    await gang.add("n0", "n1", "n2", "spare")
    places = {0: "n0", 1: "n0", 2: "n1", 3: "n1", 4: "n2", 5: "n2"}
    await gang.run(places)
    for step in (1, 2, 3):
        await gang.step(step, sharded(step))
        await gang.committed(Version(1, step))
    assert held(gang, "n1") == {(OWN, 2, 1, 3), (OWN, 3, 1, 3), (BUDDY, 0, 1, 3), (BUDDY, 1, 1, 3)}
    await gang.lose("n1")
    moved = {**places, 2: "spare", 3: "spare"}
    starts = await gang.run(moved, gang.plan(Version(1, 3)))
    for rank, start in starts.items():
        assert start.shard is not None
        assert contents(start.shard)["own"] == own(rank, 3)
    for step in (4, 5):
        await gang.step(step, sharded(step))
        await gang.committed(Version(2, step))
    assert {h[2:] for node in gang.nodes for h in held(gang, node)} == {(2, 5)}


async def test_a_rank_that_moves_to_its_buddy_is_restored_without_the_network(gang: Gang) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    await gang.step(1, sharded(1))
    await gang.committed(Version(1, 1))
    await gang.lose("n0")
    starts = await gang.run({0: "n1", 1: "n1"}, gang.plan(Version(1, 1)))
    assert starts[0].shard is not None
    assert contents(starts[0].shard)["shared"].startswith(sharded(1)(0))
    assert (OWN, 0, 1, 1) in held(gang, "n1")
    for step in (2, 3):
        await gang.step(step, sharded(step))
        await gang.committed(Version(2, step))


async def test_the_first_commit_of_a_generation_drops_later_steps_of_the_generation_before(gang: Gang) -> None:
    await gang.add("n0", "n1")
    places = {0: "n0", 1: "n1"}
    await gang.run(places)
    await gang.step(1, replica(1))
    await gang.committed(Version(1, 1))
    await asyncio.to_thread(gang.ranks[0].step, 2, replica(2)(0), own(0, 2), 5.0)
    await until(lambda: (OWN, 0, 1, 2) in held(gang, "n0"))
    await gang.run(places, gang.plan(Version(1, 1)))
    assert (OWN, 0, 1, 2) not in held(gang, "n0"), "the new generation needs its slot"
    await gang.step(2, replica(2))
    await gang.committed(Version(2, 2))
    assert {h[2:] for node in gang.nodes for h in held(gang, node)} == {(2, 2)}


async def test_only_slots_that_were_filled_before_a_fence_count(gang: Gang) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    gang.ranks[0].write(0, replica(1)(0), own(0, 1))
    slot = gang.ranks[1].connection.slot_for_any_step(1, 5.0)
    assert slot is not None
    gang.ranks[1].write(slot, replica(1)(1), own(1, 1))
    gang.ranks[1].connection.report_filled(slot, 1)
    for node in gang.nodes.values():
        node.checkpoint_service.fence(1)
    await until(lambda: (OWN, 1, 1, 1) in held(gang, "n1"))
    assert held(gang, "n0") == set()


async def test_a_filled_slot_is_digesting_until_its_shard_is_stored(gang: Gang) -> None:
    await gang.add("n0")
    await gang.run({0: "n0"})
    checkpoint_service = gang.nodes["n0"].checkpoint_service
    assert not checkpoint_service.is_digesting(0, 1)
    # On this thread, so that the event loop has not read the message yet.
    assert gang.ranks[0].step(1, replica(1)(0), own(0, 1), wait_s=5.0)
    assert checkpoint_service.is_digesting(0, 1)
    assert not checkpoint_service.is_digesting(0, 2)
    assert held(gang, "n0") == set()
    await until(lambda: not checkpoint_service.is_digesting(0, 1))
    assert held(gang, "n0") == {(OWN, 0, 1, 1)}


async def test_messages_of_a_fenced_generation_are_refused(gang: Gang) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    await gang.step(1, replica(1))
    await gang.committed(Version(1, 1))
    gang.nodes["n1"].checkpoint_service.fence(1)
    peer = gang.dial("n1", gang.nodes["n1"].address)
    late = common_pb2.Version(generation=1, step=9)
    notice = await peer.Committed(peer_pb2.CommitNotice(gang_id=GANG, node="n0", version=late))
    assert "fenced generation 1" in notice.refused
    stored = await peer.Offer(peer_pb2.ShardOffer(gang_id=GANG, node="n0", rank=0, version=late))
    assert "fenced" in stored.refused
    assert gang.nodes["n1"].committed() == Version(1, 1)


@contextmanager
def stranger(*answers: bytes) -> Iterator[int]:
    """A holder that answers whatever it is asked for with these bytes, on a connection each. Yields its port."""

    def serve() -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection:
                connection.recv(TOKEN_BYTES + REQUEST.size, socket.MSG_WAITALL)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def described(data: bytes) -> peer_pb2.ShardOffer:
    """An offer of rank 0's shard of one piece with these bytes."""
    pieces = (Piece(0, len(data), digest_of(memoryview(data))),)
    offer = peer_pb2.ShardOffer(
        gang_id=GANG, node="n0", version=Version(1, 1).to_wire(), bytes=len(data), digest=shard_digest(pieces)
    )
    offer.pieces.add(offset=0, length=len(data), digest=pieces[0].digest)
    return offer


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([b"wrong bytes", CHANGED], "n0: piece 0 has changed in its memory"),
        ([b"wrong bytes", INTACT], "n0: it has ended the stream"),
        ([b"wrong bytes", b"chanted?"], "n0: piece 0 arrived damaged, and so did the answer why"),
        ([b"wrong bytes", b""], "n0: piece 0 arrived damaged, and why is not known: it has ended the stream"),
        ([b"right"], "n0: it has ended the stream"),
    ],
)
async def test_pieces_that_arrive_damaged_or_incomplete_are_refused(
    gang: Gang, answers: list[bytes], words: str
) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"}, size=0)
    offer = described(b"right bytes")
    with stranger(*answers) as port:
        offer.access.port, offer.access.token = port, bytes(TOKEN_BYTES)
        stored = await gang.dial("n1", gang.nodes["n1"].address).Offer(offer)
    assert re.search(words, stored.refused)
    assert held(gang, "n1") == set()


async def test_an_offer_whose_pieces_can_not_be_fetched_is_refused(gang: Gang) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"}, size=0)
    offer = described(b"right bytes")
    receiver = gang.dial("n1", gang.nodes["n1"].address)
    assert "the offer names no port" in (await receiver.Offer(offer)).refused
    offer.access.port, offer.node = 1, "nobody"
    assert "no order names nobody as a member" in (await receiver.Offer(offer)).refused
    offer.node = "n0"
    assert "n0: [Errno 111] Connection refused" in (await receiver.Offer(offer)).refused


@pytest.mark.parametrize(
    ("data", "words"), [(b"wrong bytes", "piece 0 .* arrived damaged"), (b"right", "contradicts itself")]
)
async def test_inline_pieces_that_arrive_damaged_are_refused(gang: Gang, data: bytes, words: str) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"}, size=0)
    offer = described(b"right bytes")
    offer.pieces[0].data = data
    stored = await gang.dial("n1", gang.nodes["n1"].address).Offer(offer)
    assert re.search(words, stored.refused)
    assert held(gang, "n1") == set()


async def test_a_shard_without_bytes_is_refused(gang: Gang) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"}, size=0)
    offer = peer_pb2.ShardOffer(gang_id=GANG, node="n0", version=Version(1, 1).to_wire(), digest=shard_digest(()))
    stored = await gang.dial("n1", gang.nodes["n1"].address).Offer(offer)
    assert "contradicts itself" in stored.refused
    assert held(gang, "n1") == set()


async def test_messages_of_another_gang_are_refused(gang: Gang) -> None:
    await gang.add("n0")
    await gang.run({0: "n0"}, size=0)
    peer = gang.dial("n0", gang.nodes["n0"].address)
    stored = await peer.Offer(peer_pb2.ShardOffer(gang_id="other", version=common_pb2.Version(generation=1, step=1)))
    assert "belongs to gang g1" in stored.refused
    with pytest.raises(grpc.aio.AioRpcError, match="holds no shard"):
        async for _ in peer.Fetch(peer_pb2.FetchRequest(gang_id="other")):
            pass


async def test_a_flipped_byte_in_a_slot_is_found_and_the_replica_used(gang: Gang) -> None:
    await gang.add(*FOUR.values())
    await gang.run(FOUR)
    await gang.step(1, sharded(1))
    await gang.committed(Version(1, 1))
    plan = gang.plan(Version(1, 1))
    slot = gang.ranks[2].connection.slots[0]
    slot[5 << 20] ^= 1
    starts = await gang.run(FOUR, plan, size=0)
    assert starts[2].shard is not None
    assert contents(starts[2].shard)["shared"].startswith(sharded(1)(2))


async def test_a_restore_without_a_source_fails_and_uses_no_other_version(gang: Gang) -> None:
    await gang.add("n0", "n1")
    places = {0: "n0", 1: "n1"}
    await gang.run(places)
    await gang.step(1, sharded(1))
    await gang.committed(Version(1, 1))
    plan = gang.plan(Version(1, 1), tier=OWN)
    plan.durable_path = "/nowhere/step_00000007_g1_g1"
    gang.ranks[1].connection.slots[0][0] ^= 1
    with pytest.raises(RestoreError, match=r"rank 1's state at step 1 of generation 1 can't be had: n1: 1 of"):
        await gang.run(places, plan)
    assert (OWN, 1, 1, 1) not in held(gang, "n1"), "a corrupt shard is no longer reported"


async def test_a_changed_piece_of_a_replica_is_not_used(gang: Gang) -> None:
    await gang.add("n0", "n1", "spare")
    await gang.run({0: "n0", 1: "n1"})
    await gang.step(1, replica(1))
    await gang.committed(Version(1, 1))
    plan = gang.plan(Version(1, 1), tier=BUDDY)
    gang.ranks[1].connection.slots[0][3] ^= 1
    await gang.lose("n0")
    with pytest.raises(RestoreError, match="n1: piece 0 has changed in its memory"):
        await gang.run({0: "spare", 1: "spare"}, plan)
    # The replica refers to the piece. Its holder drops both when the fetch ends there.
    await until(lambda: not held(gang, "n1"))
    (found,) = gang.nodes["n1"].checkpoint_service.corrupt_copies()
    assert (found.rank, found.tier, found.pieces, found.from_node) == (1, OWN, 1, "")
    assert not gang.nodes["spare"].checkpoint_service.corrupt_copies(), "the way is not at fault"


async def test_a_plan_without_a_version_names_a_durable_folder(gang: Gang) -> None:
    await gang.add("n0")
    plan = agent_pb2.RestorePlan(durable_path="/d/step_00000008_g3_g1", skip_to_step=12)
    starts = await gang.run({0: "n0"}, plan, size=0)
    assert starts[0] == StartPoint(durable_path="/d/step_00000008_g3_g1", skip_to_step=12)
    plan.version.CopyFrom(Version(3, 8).to_wire())
    plan.sources.add(rank=0, node="n0", tier=OWN)
    with pytest.raises(RestoreError, match="its memory holds no such shard"):
        await gang.run({0: "n0"}, plan, size=0)


async def test_slots_grow_when_a_state_has_outgrown_them(gang: Gang) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    await gang.step(1, replica(1))
    await gang.committed(Version(1, 1))
    for one in gang.ranks.values():
        assert not await asyncio.to_thread(one.layout, SHARED, 1 << 20)
    assert held(gang, "n0") == {(OWN, 0, 1, 1), (BUDDY, 1, 1, 1)}, "the committed state is kept meanwhile"
    for step in (2, 3, 4):
        await gang.step(step, replica(step))
        await gang.committed(Version(1, step))


async def test_a_planned_stop_reaches_every_rank(gang: Gang) -> None:
    await gang.add("n0")
    await gang.run({0: "n0", 1: "n0"}, size=0)
    gang.nodes["n0"].checkpoint_service.stop_ranks("maintenance")
    for rank in gang.ranks.values():
        rank.connection.read_pending()
        assert rank.connection.stop_reason == "maintenance"


async def test_an_agent_that_ends_frees_all_memory(gang: Gang) -> None:
    def mapped() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "memfd:muster-" in line}  # by inode

    before = mapped()  # by earlier tests; it may be unmapped at any moment
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    for step in (1, 2, 3):
        await gang.step(step, sharded(step))
        await gang.committed(Version(1, step))
    assert mapped() - before
    for rank in gang.ranks.values():
        rank.connection.close()
    gang.ranks.clear()
    await gang.lose("n0")
    await gang.lose("n1")
    await until(lambda: not mapped() - before)


def flush_order(gang: Gang, version: Version, tier: int | None = OWN) -> agent_pb2.FlushOrder:
    gang.serial += 1
    plan = gang.plan(version, tier)
    return agent_pb2.FlushOrder(serial=gang.serial, version=version.to_wire(), sources=plan.sources, reason="a test")


async def flush_all(gang: Gang, order: agent_pb2.FlushOrder, folder: Path) -> None:
    work: list[Awaitable[object]] = [n.checkpoint_service.flush(order, str(folder)) for n in gang.nodes.values()]
    await asyncio.gather(*work)


async def test_a_flushed_checkpoint_is_believed_whatever_the_umask(gang: Gang, tmp_path: Path) -> None:
    await gang.add(*FOUR.values())
    await gang.run(FOUR)
    await gang.step(7, replica(7))
    await gang.committed(Version(1, 7))
    before = os.umask(0)
    try:
        await flush_all(gang, flush_order(gang, Version(1, 7)), tmp_path / "durable")
    finally:
        os.umask(before)
    folder = tmp_path / "durable/step_00000007_g1_g1"
    with TrustedFolder(folder) as trusted:
        for file in folder.iterdir():
            trusted.check_file(file.name)


@pytest.mark.parametrize("tier", [OWN, BUDDY])
async def test_a_flush_writes_every_published_item_where_the_metadata_says(
    gang: Gang, tmp_path: Path, tier: int
) -> None:
    await gang.add(*FOUR.values())
    await gang.run(FOUR)
    await gang.step(7, replica(7))
    await gang.committed(Version(1, 7))
    await flush_all(gang, flush_order(gang, Version(1, 7), tier), tmp_path / "durable")
    folder = tmp_path / "durable/step_00000007_g1_g1"
    assert sorted(p.name for p in (tmp_path / "durable").iterdir()) == [folder.name]
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        [durable_folders.METADATA, durable_folders.MANIFEST, *(durable_folders.rank_file_name(r) for r in FOUR)]
    )
    items = {name: (offset, length) for name, offset, length in pickle.loads((folder / ".metadata").read_bytes())}
    offset, length = items["item0"]
    assert (folder / "__0_0.distcp").read_bytes()[offset : offset + length] == replica(7)(0)
    for rank in FOUR:
        offset, length = items[f"item{100 + rank}"]
        assert (folder / durable_folders.rank_file_name(rank)).read_bytes()[offset : offset + length] == own(rank, 7)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert (manifest["step"], manifest["generation"], manifest["world_size"]) == (7, 1, 4)
    assert newest_checkpoint(str(tmp_path / "durable")) == str(folder)
    assert finished_steps_of(str(folder)) == 7


async def test_a_flush_of_a_version_that_no_node_holds_fails(gang: Gang, tmp_path: Path) -> None:
    await gang.add("n0")
    await gang.run({0: "n0"})
    await gang.step(1, replica(1))
    await gang.committed(Version(1, 1))
    order = flush_order(gang, Version(1, 1))
    order.version.step = 9
    with pytest.raises(FlushError, match="n0 holds no shard of rank 0 at step 9"):
        await gang.nodes["n0"].checkpoint_service.flush(order, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


async def test_a_flush_of_a_running_gang_writes_one_version_of_all_ranks(gang: Gang, tmp_path: Path) -> None:
    await gang.add(*FOUR.values())
    await gang.run(FOUR, size=1 << 20)
    end = 100_000
    data = [random.Random(step).randbytes(1 << 20) for step in range(8)]

    async def rank_runs(rank: int) -> None:
        # The ranks finish each step together, as a collective operation makes them, with or without a free slot.
        for step in itertools.count(1):
            await asyncio.to_thread(gang.ranks[rank].step, step, data[step % 8], own(rank, step))
            await barrier.wait()
            await asyncio.sleep(0.001)  # leaves time for the threads that write the checkpoint
            if step == end:
                return

    barrier = asyncio.Barrier(4)
    running = [asyncio.create_task(rank_runs(rank)) for rank in FOUR]
    for round in (1, 2, 3):
        before = gang.nodes["n2"].checkpoint_service.committed().step
        await until(
            lambda before=before: min(n.checkpoint_service.committed().step for n in gang.nodes.values()) > before + 3
        )
        order = agent_pb2.FlushOrder(serial=round, version=Version(1, 1).to_wire(), reason="asked for")
        for rank, node in FOUR.items():
            order.sources.add(rank=rank, node=node, tier=OWN)

        async def arrives(name: str, late_s: float, order: agent_pb2.FlushOrder = order) -> None:
            await asyncio.sleep(late_s)
            await gang.nodes[name].checkpoint_service.flush(order, str(tmp_path))

        await asyncio.gather(*(arrives(name, 0.03 * i) for i, name in enumerate(FOUR.values())))
    end = gang.nodes["n0"].checkpoint_service.progress()[0] + 20
    await asyncio.gather(*running)
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 3
    for folder in folders:
        step = finished_steps_of(str(folder))
        items = {name: (a, b) for name, a, b in pickle.loads((folder / ".metadata").read_bytes())}
        for rank in FOUR:
            offset, length = items[f"item{100 + rank}"]
            written = (folder / durable_folders.rank_file_name(rank)).read_bytes()
            assert written[offset : offset + length] == own(rank, step), "all ranks at one step"
        assert (folder / "__0_0.distcp").read_bytes()[: 1 << 20] == data[step % 8]


@pytest.mark.parametrize("full", [0, 1])
async def test_a_flush_to_a_full_disk_names_it_and_leaves_nothing(gang: Gang, tmp_path: Path, full: int) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    await gang.step(1, sharded(1))
    await gang.committed(Version(1, 1))
    order = flush_order(gang, Version(1, 1))

    class FullStore(PosixFolder):
        def create(self, name: str) -> PosixFile:
            if name.endswith(f"/__{full}_0.distcp"):
                return PosixFile(os.open("/dev/full", os.O_WRONLY))
            return super().create(name)

    flushers = [node.checkpoint_service._flusher for node in gang.nodes.values()]
    results = await asyncio.gather(*(one.flush(order, FullStore(tmp_path)) for one in flushers), return_exceptions=True)
    assert f"{tmp_path} is full (No space left on device): free space there" in str(results[full])
    assert isinstance(results[0], FlushError)
    assert list(tmp_path.iterdir()) == []
    # The version is still in memory, so it can be flushed once there is space.
    await flush_all(gang, flush_order(gang, Version(1, 1)), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001_g1_g1"]


async def test_a_flush_removes_leftovers_of_older_flushes_only(gang: Gang, tmp_path: Path) -> None:
    await gang.add("n0")
    await gang.run({0: "n0"})
    await gang.step(5, replica(5))
    await gang.committed(Version(1, 5))
    gang.serial = 6
    kept = {
        ".step_00000002_g2_g1.6.tmp",
        ".step_00000003_g1_g1.8.tmp",
        ".step_00000003_g1_other.1.tmp",
        ".step_00000003_g1.tmp",
        ".flush-g1-1-3",
        "step_00000001_g1_g1",
    }
    for name in {*kept, ".step_00000003_g1_g1.4.tmp", ".step_00000005_g1_g1.6.tmp", ".flush-g1-3"}:
        (tmp_path / name).mkdir()
    await flush_all(gang, flush_order(gang, Version(1, 5)), tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {*kept, "step_00000005_g1_g1"}


async def test_jobs_that_share_a_folder_keep_their_checkpoints_apart(tmp_path: Path) -> None:
    """The same job twice, without faults: both end at the same step of generation 1."""
    for run in (1, 2):
        async with running_gang(f"tiny-{run}") as gang:
            await gang.add("n0", "n1")
            await gang.run({0: "n0", 1: "n1"})
            await gang.step(1, replica(run))
            await gang.committed(Version(1, 1))
            await flush_all(gang, flush_order(gang, Version(1, 1)), tmp_path)
    folders = sorted(tmp_path.iterdir())
    assert [p.name for p in folders] == ["step_00000001_g1_tiny-1", "step_00000001_g1_tiny-2"]
    for run, folder in enumerate(folders, 1):
        assert (folder / "__0_0.distcp").read_bytes().startswith(replica(run)(0))


async def test_a_version_may_be_flushed_again_and_another_folder_of_its_name_is_an_error(
    gang: Gang, tmp_path: Path
) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    await gang.step(1, sharded(1))
    await gang.committed(Version(1, 1))
    final = tmp_path / "step_00000001_g1_g1"
    for _ in range(2):
        await flush_all(gang, flush_order(gang, Version(1, 1)), tmp_path)
        assert list(tmp_path.iterdir()) == [final]
    manifest = (final / durable_folders.MANIFEST).read_bytes()
    (final / durable_folders.MANIFEST).write_bytes(manifest.replace(b'"world_size": 2', b'"world_size": 3'))
    with pytest.raises(FlushError, match="is there already, and is not step 1 of generation 1 of gang g1 as it stands"):
        await flush_all(gang, flush_order(gang, Version(1, 1)), tmp_path)
    assert list(tmp_path.iterdir()) == [final]
    assert b'"world_size": 3' in (final / durable_folders.MANIFEST).read_bytes()


@pytest.mark.parametrize("running_file", ["", ".flush-*/*", ".step_*", ".step_*/*", ".step_*/*.part", "step_*"])
async def test_a_newer_flush_of_the_same_version_supersedes_the_running_one(
    gang: Gang, tmp_path: Path, running_file: str
) -> None:
    await gang.add(*FOUR.values())
    await gang.run(FOUR, size=1 << 20)
    await gang.step(1, small)
    await gang.committed(Version(1, 1))
    older = asyncio.gather(flush_all(gang, flush_order(gang, Version(1, 1)), tmp_path), return_exceptions=True)
    if running_file:  # which may come and go unseen on a busy machine
        await until(lambda: any(tmp_path.glob(running_file)) or older.done())
    await flush_all(gang, flush_order(gang, Version(1, 1)), tmp_path)
    (ended,) = await older
    assert ended is None or (isinstance(ended, FlushError) and "given up" in str(ended))
    await until(lambda: [p.name for p in tmp_path.iterdir()] == ["step_00000001_g1_g1"])
    for rank in FOUR:
        data = (tmp_path / "step_00000001_g1_g1" / durable_folders.rank_file_name(rank)).read_bytes()
        assert own(rank, 1) in data


async def test_a_flush_that_waits_for_others_ends_when_a_newer_one_is_ordered(gang: Gang, tmp_path: Path) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"}, size=1 << 20)
    await gang.step(1, small)
    await gang.committed(Version(1, 1))
    one, two, three = (flush_order(gang, Version(1, 1)) for _ in range(3))
    waiting = asyncio.create_task(gang.nodes["n0"].checkpoint_service.flush(one, str(tmp_path)))
    await until(lambda: any(tmp_path.glob(".flush-*/*")))
    await flush_all(gang, three, tmp_path)
    with pytest.raises(FlushError, match="a newer flush was ordered"):
        await waiting
    with pytest.raises(FlushError, match="flush 2 is given up: flush 3, a newer one"):
        await gang.nodes["n0"].checkpoint_service.flush(two, str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001_g1_g1"]


async def test_a_node_without_a_part_of_the_newer_flush_gives_the_older_one_up_too(gang: Gang, tmp_path: Path) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"}, size=1 << 20)
    await gang.step(1, small)
    await gang.committed(Version(1, 1))
    older, newer = flush_order(gang, Version(1, 1)), flush_order(gang, Version(1, 1))
    for source in newer.sources:
        source.node = "n1"
    waiting = asyncio.create_task(gang.nodes["n0"].checkpoint_service.flush(older, str(tmp_path)))
    await until(lambda: any(tmp_path.glob(".flush-*/*")))
    await flush_all(gang, newer, tmp_path)
    with pytest.raises(FlushError, match="a newer flush was ordered"):
        await waiting
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001_g1_g1"]


async def test_a_writer_whose_flush_leader_has_given_up_leaves_nothing(tmp_path: Path) -> None:
    declarations = flush_version.declarations_folder(GANG, 1)
    part = flush_part.FlushPart(
        Version(1, 1),
        1,
        PosixFolder(tmp_path),
        GANG,
        "a test",
        is_leader=False,
        declarations=declarations,
        given_up=FlushCancellation(),
    )
    with pytest.raises(FlushError, match="the node that leads the flush has ended it"):
        flush_part.write_part(part, [])
    assert list(tmp_path.iterdir()) == []


async def test_a_slot_that_changed_is_not_flushed(gang: Gang, tmp_path: Path) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    await gang.step(1, sharded(1))
    await gang.committed(Version(1, 1))
    gang.ranks[1].connection.slots[0][9] ^= 4
    order = flush_order(gang, Version(1, 1))
    results = await asyncio.gather(
        *(n.checkpoint_service.flush(order, str(tmp_path)) for n in gang.nodes.values()), return_exceptions=True
    )
    assert [type(r) for r in results] == [FlushError, FlushError]
    assert any("rank 1's shard of step 1 of generation 1 has changed in memory" in str(r) for r in results)
    assert list(tmp_path.iterdir()) == []
