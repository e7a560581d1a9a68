"""Ranks of one node with equal bytes: their buddy gets these once, and keeps them once."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
from tests.unit.test_checkpoint_service import BUDDY, SHARED, Gang, held, own, replica, running_gang, sharded, until

from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.shards import Shard
from muster.checkpoint.store.replication.incoming_pieces import IncomingPieces
from muster.checkpoint.testing.gang_in_one_process import contents

PLACES = {0: "n0", 1: "n0", 2: "n1"}
V1, V2 = Version(1, 1), Version(1, 2)


def bytes_of(step: int, rank: int) -> bytes:
    """Ranks 0 and 1 hold equal bytes, and rank 2 others."""
    return sharded(step)(2) if rank == 2 else replica(step)(rank)


@pytest.fixture
async def gang() -> AsyncIterator[Gang]:
    async with running_gang() as gang:
        await gang.add("n0", "n1")
        await gang.run(PLACES)
        yield gang


def replicas(gang: Gang, version: Version) -> list[Shard]:
    """The replicas of ranks 0 and 1."""
    found = [gang.nodes["n1"].checkpoint_service._shard_store.replica(rank, version) for rank in (0, 1)]
    return [replica for replica in found if replica is not None]


def stored_bytes(*shards: Shard) -> int:
    return sum(os.fstat(shard.memory.fd).st_blocks * 512 for shard in shards)


async def keep(gang: Gang, step: int) -> None:
    """All ranks keep a step at the same moment."""
    keeping = [
        asyncio.to_thread(one.step, step, bytes_of(step, rank), own(rank, step), 5.0)
        for rank, one in gang.ranks.items()
    ]
    assert all(await asyncio.gather(*keeping))
    await gang.committed(Version(1, step))


async def test_equal_bytes_of_two_ranks_come_once_and_are_stored_once(gang: Gang) -> None:
    for step in (1, 2, 3):
        before = gang.nodes["n1"].received_bytes
        await keep(gang, step)
        assert SHARED <= gang.nodes["n1"].received_bytes - before < SHARED + (2 << 20)
        both = replicas(gang, Version(1, step))
        assert len(both) == 2
        assert SHARED <= stored_bytes(*both) < SHARED + (2 << 20)
        for rank, shard in enumerate(both):
            assert not shard.corrupt_pieces()
            assert bytes(shard.piece(0)) == bytes_of(step, rank)[: 4 << 20]


async def test_both_ranks_are_restored_from_what_is_stored_once(gang: Gang) -> None:
    await keep(gang, 1)
    await gang.lose("n0")
    starts = await gang.run({0: "n1", 1: "n1", 2: "n1"}, gang.plan(V1), size=0)
    for rank, start in starts.items():
        assert start.shard is not None
        assert contents(start.shard)["own"] == own(rank, 1)
        assert contents(start.shard)["shared"].startswith(bytes_of(1, rank))


async def test_the_memory_is_freed_when_the_last_replica_that_uses_it_goes(gang: Gang) -> None:
    await keep(gang, 1)
    store = gang.nodes["n1"].checkpoint_service._shard_store
    one, other = replicas(gang, V1)
    user, used = (one, other) if one.refers_to(other) else (other, one)
    store.drop(lambda shard: shard is used, "a test")
    assert not user.corrupt_pieces(), "what it refers to is still there"
    with used.held():  # raises if it has been freed
        pass
    store.drop(lambda shard: shard is user, "a test")
    with pytest.raises(RuntimeError, match="has been freed"):
        used.hold()


async def test_a_change_in_what_is_stored_once_takes_both_replicas_out_of_use(gang: Gang) -> None:
    await keep(gang, 1)
    one, other = replicas(gang, V1)
    used = other if one.refers_to(other) else one
    used.memory.view[7] ^= 1
    gang.nodes["n1"].checkpoint_service._shard_store.quarantine(used, "a test")
    assert {(BUDDY, 0, 1, 1), (BUDDY, 1, 1, 1)}.isdisjoint(held(gang, "n1"))


async def test_a_rank_that_waits_for_another_ones_pieces_fetches_them_if_that_one_fails(gang: Gang) -> None:
    transport = gang.nodes["n1"].transport
    transport.damages = 3  # of one piece after the other: the first fetch is given up
    await keep(gang, 1)
    assert len(replicas(gang, V1)) == 2
    assert not any(shard.corrupt_pieces() for shard in replicas(gang, V1))
    await until(lambda: gang.nodes["n0"].committed() == V1)


def test_an_offer_waits_for_earlier_ones_and_never_for_later_ones() -> None:
    incoming = IncomingPieces()
    with incoming.claim(V1, {b"a", b"b"}) as (first, earlier_of_first):
        with incoming.claim(V1, {b"b", b"c"}) as (second, earlier_of_second):
            assert (first, second) == ({b"a", b"b"}, {b"c"})
            assert not earlier_of_first
            (over,) = earlier_of_second
            with incoming.claim(V2, {b"b"}) as (other_version, none):
                assert (other_version, none) == ({b"b"}, set())
        assert not over.is_set()
    assert over.is_set()
    with incoming.claim(V1, {b"b"}) as (again, none):
        assert (again, none) == ({b"b"}, set())
