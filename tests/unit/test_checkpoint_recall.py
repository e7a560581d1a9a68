"""Restores: from several nodes at once, from what this node holds already, and without what is corrupt."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.unit.test_checkpoint_service import BUDDY, FOUR, OWN, Gang, held, own, replica, running_gang, sharded, until

from muster.checkpoint.format.errors import RestoreError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.sealed_memory import NoMemoryLeft, SealedMemory
from muster.checkpoint.store.restore import piece_gathering
from muster.checkpoint.store.streams import piece_fetch
from muster.checkpoint.training.agent_connection import StartPoint
from muster.v1.agent_pb2 import CorruptCopy, RestoreProgress

V1 = Version(1, 1)


@pytest.fixture
async def gang() -> AsyncIterator[Gang]:
    async with running_gang() as gang:
        yield gang


@pytest.fixture(autouse=True)
def every_piece_is_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of five pieces comes from several nodes, as one of hundreds would."""
    monkeypatch.setattr(piece_fetch, "BATCH_PIECES", 1)
    monkeypatch.setattr(piece_gathering, "BATCH_PIECES", 1)


def bytes_of(start: StartPoint) -> bytes:
    assert start.shard is not None
    return bytes(start.shard)


def progress(gang: Gang, node: str) -> RestoreProgress:
    found = gang.nodes[node].checkpoint_service.restore_progress()
    assert found is not None
    return found


def corrupt(gang: Gang, node: str) -> list[CorruptCopy]:
    return gang.nodes[node].checkpoint_service.corrupt_copies()


async def committed_gang(gang: Gang, places: dict[int, str], *spares: str, equal: bool = True) -> None:
    """All ranks have kept step 1."""
    await gang.add(*places.values(), *spares)
    await gang.run(places)
    await gang.step(1, (replica if equal else sharded)(1))
    await gang.committed(V1)


async def test_pieces_that_one_holder_can_not_give_come_from_ranks_with_equal_ones(gang: Gang) -> None:
    await committed_gang(gang, FOUR, "spare")
    expected = bytes(gang.ranks[1].connection.slots[0])
    plan = gang.plan(V1)
    gang.ranks[2].connection.slots[0][5 << 20] ^= 1  # rank 1's replica refers to it
    await gang.lose("n1")
    starts = await gang.run({1: "spare"}, plan, size=0)
    assert bytes_of(starts[1]) == expected
    found = progress(gang, "spare")
    assert sum(found.fetched_bytes.values()) == found.bytes == len(expected), "nothing comes twice"
    assert found.fetched_bytes.keys() - {"n2"}, "at least the changed piece"
    assert (found.ranks_done, found.own_bytes, found.copied_bytes) == (1, 0, 0)


async def test_a_holder_that_is_lost_is_replaced_by_the_other_copy(gang: Gang) -> None:
    await committed_gang(gang, FOUR, "spare", equal=False)
    plan = gang.plan(V1)
    await gang.nodes["n1"].server.stop(0)  # its process has ended, and its node still has an address
    starts = await gang.run({1: "spare"}, plan, size=0)
    assert bytes_of(starts[1])[:100] == sharded(1)(1)[:100]
    assert progress(gang, "spare").fetched_bytes.keys() == {"n2"}


async def test_ranks_that_move_to_one_node_fetch_equal_pieces_once(gang: Gang) -> None:
    places = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}
    await gang.add("n0", "n1", "spare")
    await gang.run(places)
    await gang.step(1, replica(1))
    await gang.committed(V1)
    await gang.lose("n1")
    starts = await gang.run({**places, 2: "spare", 3: "spare"}, gang.plan(V1), size=0)
    for rank in (2, 3):
        assert own(rank, 1) in bytes_of(starts[rank])
        assert bytes_of(starts[rank]).startswith(replica(1)(rank))
    found = progress(gang, "spare")
    assert found.copied_bytes > len(replica(1)(0)), "one of them copies"
    assert sum(found.fetched_bytes.values()) + found.copied_bytes == found.bytes
    assert sum(found.fetched_bytes.values()) < found.bytes - len(replica(1)(0))


async def test_a_rank_that_moves_beside_an_equal_replica_fetches_only_its_own_objects(gang: Gang) -> None:
    places = {0: "n0", 1: "n1", 2: "n2"}
    await committed_gang(gang, places)
    await gang.lose("n0")
    starts = await gang.run({0: "n2", 1: "n1", 2: "n2"}, gang.plan(V1), size=0)
    assert own(0, 1) in bytes_of(starts[0])
    assert bytes_of(starts[0]).startswith(replica(1)(0))
    found = progress(gang, "n2")
    assert found.fetched_bytes.keys() == {"n1"}
    assert found.fetched_bytes["n1"] < 1 << 18
    assert found.own_bytes == len(bytes_of(starts[2]))
    assert (found.ranks, found.ranks_done) == (2, 2)


async def test_of_a_corrupt_slot_only_the_changed_piece_is_fetched(gang: Gang) -> None:
    await committed_gang(gang, FOUR, equal=False)
    plan = gang.plan(V1)
    slot = gang.ranks[2].connection.slots[0]
    expected = bytes(slot)
    slot[5 << 20] ^= 1
    starts = await gang.run(FOUR, plan, size=0)
    assert bytes_of(starts[2]) == expected
    assert progress(gang, "n2").fetched_bytes == {"n3": 4 << 20}
    assert progress(gang, "n2").copied_bytes == len(expected) - (4 << 20)
    assert corrupt(gang, "n2") == [CorruptCopy(rank=2, version=V1.to_wire(), tier=OWN, pieces=1, of_pieces=5)]
    assert (OWN, 2, 1, 1) in held(gang, "n2"), "the restored copy"
    assert not any(corrupt(gang, node) for node in ("n0", "n1", "n3"))


async def test_a_corrupt_replica_is_never_a_source_again(gang: Gang) -> None:
    await committed_gang(gang, {0: "n0", 1: "n1"}, "spare", equal=False)
    plan = gang.plan(V1)
    replica_of_0 = gang.nodes["n1"].checkpoint_service._shard_store.replica(0, V1)
    assert replica_of_0 is not None
    replica_of_0.memory.view[77] ^= 1
    starts = await gang.run({0: "n1", 1: "n1"}, plan, size=0)  # rank 0 starts beside the replica
    assert bytes_of(starts[0]).startswith(sharded(1)(0))
    assert progress(gang, "n1").fetched_bytes == {"n0": 4 << 20}, "what is intact is copied"
    assert corrupt(gang, "n1") == [CorruptCopy(rank=0, version=V1.to_wire(), tier=BUDDY, pieces=1, of_pieces=5)]
    assert (BUDDY, 0, 1, 1) not in held(gang, "n1")


async def test_a_copy_that_arrives_damaged_is_not_kept_and_comes_again(gang: Gang) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    gang.nodes["n1"].transport.damages = 1
    await gang.step(1, sharded(1))
    await gang.committed(V1)
    assert corrupt(gang, "n1") == [CorruptCopy(rank=0, version=V1.to_wire(), tier=BUDDY, pieces=1, from_node="n0")]
    replica_of_0 = gang.nodes["n1"].checkpoint_service._shard_store.replica(0, V1)
    assert replica_of_0 is not None
    assert not replica_of_0.corrupt_pieces()
    assert bytes(replica_of_0.piece(0)) == sharded(1)(0)[: 4 << 20]


@pytest.mark.parametrize("damages", [1, 2])
async def test_a_state_that_arrives_damaged_is_asked_for_again(gang: Gang, damages: int) -> None:
    await committed_gang(gang, {0: "n0", 1: "n1"}, "spare", equal=False)
    await gang.lose("n0")
    gang.nodes["spare"].transport.damages = damages
    starts = await gang.run({0: "spare", 1: "n1"}, gang.plan(V1), size=0)
    assert bytes_of(starts[0]).startswith(sharded(1)(0))
    assert corrupt(gang, "spare") == [CorruptCopy(rank=0, version=V1.to_wire(), tier=OWN, pieces=1, from_node="n1")]
    found = progress(gang, "spare")
    assert sum(found.fetched_bytes.values()) == found.bytes


async def test_a_way_that_damages_piece_after_piece_is_given_up_and_its_copy_is_not_accused(gang: Gang) -> None:
    await committed_gang(gang, {0: "n0", 1: "n1"}, "spare", equal=False)
    await gang.lose("n0")
    plan = gang.plan(V1)
    transport = gang.nodes["spare"].transport
    transport.damages = 1 << 30
    with pytest.raises(RestoreError, match=r"n1: 3 pieces arrived damaged"):
        await gang.run({0: "spare", 1: "n1"}, plan, size=0)
    assert {copy.from_node for copy in corrupt(gang, "spare")} == {"n1"}
    assert not corrupt(gang, "n1")
    assert (BUDDY, 0, 1, 1) in held(gang, "n1"), "the copy is as it was"


async def test_a_shard_that_changes_before_its_copy_is_made_is_void(gang: Gang) -> None:
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    transport = gang.nodes["n1"].transport
    transport.flows.clear()
    await gang.step(1, sharded(1))
    await until(lambda: transport.fetches == 1)
    gang.ranks[0].connection.slots[0][5 << 20] ^= 1  # after its digest, before the copy
    transport.flows.set()
    await until(lambda: (OWN, 0, 1, 1) not in held(gang, "n0"))
    assert corrupt(gang, "n0") == [CorruptCopy(rank=0, version=V1.to_wire(), tier=OWN, pieces=1, of_pieces=5)]
    assert (BUDDY, 0, 1, 1) not in held(gang, "n1")
    await gang.step(2, sharded(2))
    await gang.committed(Version(1, 2))


async def test_a_copy_made_of_changed_memory_of_the_same_node_takes_that_memory_out_of_use(gang: Gang) -> None:
    gang.slot_wait_s = 0.0
    await gang.add("n0", "n1")
    await gang.run({0: "n0", 1: "n1"})
    await gang.step(1, replica(1))
    await gang.committed(V1)
    before = gang.nodes["n1"].checkpoint_service._shard_store.replica(0, V1)
    assert before is not None
    source, _ = before.location(1)
    source.memory.view[5 << 20] ^= 1
    # Rank 0 keeps a step with equal pieces: its buddy copies them from there.
    assert await asyncio.to_thread(gang.ranks[0].step, 2, replica(1)(0), own(0, 2), 5.0)
    await until(lambda: bool(corrupt(gang, "n1")))
    found = CorruptCopy(rank=source.rank, version=V1.to_wire(), tier=source.tier, pieces=1, of_pieces=5)
    assert corrupt(gang, "n1") == [found]
    assert await asyncio.to_thread(gang.ranks[1].step, 2, replica(1)(1), own(1, 2), 5.0)
    await gang.committed(Version(1, 2))
    replica_of_0 = gang.nodes["n1"].checkpoint_service._shard_store.replica(0, Version(1, 2))
    assert replica_of_0 is not None
    assert not replica_of_0.corrupt_pieces()


async def test_a_restore_reports_its_progress_while_it_runs(gang: Gang) -> None:
    await committed_gang(gang, {0: "n0", 1: "n1"}, "spare", equal=False)
    await gang.lose("n0")
    spare = gang.nodes["spare"]
    assert spare.checkpoint_service.restore_progress() is None
    spare.transport.flows.clear()
    gang.begin({0: "spare", 1: "n1"}, gang.plan(V1))
    await until(lambda: progress(gang, "spare").bytes > 0)
    found = progress(gang, "spare")
    assert (found.generation, found.ranks, found.ranks_done, dict(found.fetched_bytes)) == (2, 1, 0, {})
    spare.transport.flows.set()
    await until(lambda: progress(gang, "spare").ranks_done == 1)
    found = progress(gang, "spare")
    assert dict(found.fetched_bytes) == {"n1": found.bytes}
    await until(lambda: progress(gang, "n1").ranks_done == 1)
    assert progress(gang, "n1").own_bytes == progress(gang, "n1").bytes > 0


async def test_without_memory_for_a_second_copy_the_corrupt_one_is_given_up_first(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    await committed_gang(gang, {0: "n0", 1: "n1"}, equal=False)
    plan = gang.plan(V1)
    gang.ranks[0].connection.slots[0][3] ^= 1
    pool = gang.nodes["n0"].checkpoint_service._slots.pool
    allocate, refusals = pool.allocate, [True]

    def allocate_later(rank: int, size: int, *, later: bool = False) -> SealedMemory:
        if refusals:
            refusals.pop()
            raise NoMemoryLeft("test")
        return allocate(rank, size, later=later)

    monkeypatch.setattr(pool, "allocate", allocate_later)
    starts = await gang.run({0: "n0", 1: "n1"}, plan, size=0)
    assert bytes_of(starts[0]).startswith(sharded(1)(0))
    assert progress(gang, "n0").fetched_bytes.keys() == {"n1"}
    assert progress(gang, "n0").copied_bytes == 0
