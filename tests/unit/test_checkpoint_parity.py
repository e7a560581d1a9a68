"""Parities in place of whole copies: a lost rank's shard is rebuilt from its parity and the other shards."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.test_checkpoint_service import (
    BUDDY,
    SHARED,
    Gang,
    contents,
    flush_all,
    flush_order,
    held,
    own,
    running_gang,
    sharded,
    until,
)

from muster.checkpoint.format.errors import FlushError, RestoreError
from muster.checkpoint.format.layout import PIECE_BYTES
from muster.checkpoint.format.versions import Version
from muster.checkpoint.redundancy.scheme import Place
from muster.checkpoint.redundancy.wire import places_of_order
from muster.checkpoint.store.memory.pieces import Piece, digest_of, shard_digest
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.parity import exclusive_or, parity_receiver, parity_restore
from muster.checkpoint.store.parity.parity_part import ParityPart, PartDropped, PartKey
from muster.v1 import agent_pb2, common_pb2, peer_pb2

SIX = {rank: f"n{rank}" for rank in range(6)}
GROUPS = (("n0", "n1", "n2"), ("n3", "n4", "n5"))


@asynccontextmanager
async def gang_with_parities() -> AsyncIterator[Gang]:
    """Six nodes that have committed step 2 of generation 1."""
    async with running_gang() as gang:
        gang.parity_groups = GROUPS
        await gang.add(*SIX.values(), "spare0", "spare1")
        await gang.run(SIX)
        for step in (1, 2):
            await gang.step(step, sharded(step))
            await gang.committed(Version(1, step))
        yield gang


async def go_on(gang: Gang, places: dict[int, str], version: Version) -> None:
    """Start the next generation from a version of which some shards may be lost. Check all bytes that ranks get."""
    moved = {SIX[rank]: node for rank, node in places.items()}
    gang.parity_groups = tuple(tuple(moved[name] for name in group) for group in GROUPS)
    starts = await gang.run(places, gang.plan(version))
    for rank, start in starts.items():
        assert start.shard is not None
        assert contents(start.shard)["own"] == own(rank, version.step)
        assert contents(start.shard)["shared"][:SHARED] == sharded(version.step)(rank)


def whole_parts(gang: Gang, version: Version) -> set[tuple[str, tuple[int, ...], int]]:
    """(node, ranks, part) of every whole part of a parity."""
    return {
        (name, tuple(parity.ranks), parity.part)
        for name, node in gang.nodes.items()
        for parity in node.checkpoint_service.combined()
        if Version.from_wire(parity.version) == version
    }


async def test_each_node_holds_a_part_of_its_groups_parity_and_no_copies() -> None:
    async with gang_with_parities() as gang:
        assert whole_parts(gang, Version(1, 2)) == {
            (name, tuple(int(member[1:]) for member in group), part)
            for group in GROUPS
            for part, name in enumerate(group)
        }
        assert not whole_parts(gang, Version(1, 1))
        assert all(tier != BUDDY for node in gang.nodes for tier, *_ in held(gang, node))


@pytest.mark.parametrize("lost", [0, 1, 5])
async def test_a_lost_rank_is_rebuilt_from_its_parity(lost: int) -> None:
    async with gang_with_parities() as gang:
        await gang.lose(SIX[lost])
        await go_on(gang, {**SIX, lost: "spare0"}, Version(1, 2))
        await gang.step(3, sharded(3))
        await gang.committed(Version(2, 3))


async def test_one_node_of_each_group_may_be_lost() -> None:
    async with gang_with_parities() as gang:
        await gang.lose("n1")
        await gang.lose("n3")
        await go_on(gang, {**SIX, 1: "spare0", 3: "spare1"}, Version(1, 2))


async def test_a_node_may_hold_several_parts_of_one_parity() -> None:
    """It has got the seat of another rank meanwhile."""
    async with gang_with_parities() as gang:
        key = PartKey(Version(1, 2), (0, 1, 2), 2)
        stores = {name: gang.nodes[name].checkpoint_service._kept._parts for name in ("n0", "n2")}
        stores["n0"]._parts[key] = stores["n2"]._parts.pop(key)
        assert {("n0", (0, 1, 2), part) for part in (0, 2)} < whole_parts(gang, Version(1, 2))
        await gang.lose("n1")
        await go_on(gang, {**SIX, 1: "spare0"}, Version(1, 2))


async def test_two_lost_nodes_of_one_group_are_too_many() -> None:
    async with gang_with_parities() as gang:
        await gang.lose("n1")
        await gang.lose("n2")
        places = {**SIX, 1: "spare0", 2: "spare1"}
        with pytest.raises(RestoreError, match=r"of the parity of ranks \[0, 1, 2\] there are only the parts on n0"):
            await gang.run(places, gang.plan(Version(1, 2)))


async def test_after_a_restore_the_newcomer_gets_its_parts_before_the_next_commit() -> None:
    async with gang_with_parities() as gang:
        await gang.lose("n1")
        await go_on(gang, {**SIX, 1: "spare0"}, Version(1, 2))
        assert ("spare0", (0, 1, 2), 1) not in whole_parts(gang, Version(1, 2))
        for rank in gang.ranks.values():
            rank.connection.report_progress(3)
        await until(lambda: ("spare0", (0, 1, 2), 1) in whole_parts(gang, Version(1, 2)))
        await gang.lose("n2")
        await go_on(gang, {**SIX, 1: "spare0", 2: "spare1"}, Version(1, 2))


async def test_shards_that_another_number_of_ranks_wrote_are_added_to_no_parity() -> None:
    """A part combines shards by the numbers that ranks have now."""
    async with gang_with_parities() as gang:
        plan = gang.plan(Version(1, 2))
        plan.written_ranks, plan.resharded = len(SIX), True
        gang.parity_groups = (tuple(f"n{rank}" for rank in range(5)),)
        gang.begin({rank: f"n{rank}" for rank in range(5)}, plan)
        assert not any(node.checkpoint_service._commit._restored_ranks() for node in gang.nodes.values())


async def test_a_transfer_that_breaks_is_taken_up_and_adds_no_piece_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_receiver, "WINDOW_PIECES", 1)
    async with gang_with_parities() as gang:
        gang.nodes["n0"].transport.damages = gang.nodes["n1"].transport.damages = 2
        await gang.step(3, sharded(3))
        await gang.committed(Version(1, 3))
        await gang.lose("n2")
        await go_on(gang, {**SIX, 2: "spare0"}, Version(1, 3))


async def test_no_step_is_committed_before_all_holders_have_every_shard() -> None:
    async with gang_with_parities() as gang:
        gang.nodes["n1"].transport.flows.clear()
        await gang.step(3, sharded(3))
        await until(lambda: ("n0", (0, 1, 2), 0) in whole_parts(gang, Version(1, 3)))
        assert gang.nodes["n0"].committed() == Version(1, 2)
        gang.nodes["n1"].transport.flows.set()
        await gang.committed(Version(1, 3))


async def test_a_flush_after_a_loss_writes_what_is_rebuilt(tmp_path: Path) -> None:
    async with gang_with_parities() as gang:
        whole = flush_order(gang, Version(1, 2))
        await flush_all(gang, whole, tmp_path / "whole")
        await gang.lose("n4")
        order = flush_order(gang, Version(1, 2), None)
        assert {source.node for source in order.sources if source.rank == 4} == {"n3", "n5"}
        await flush_all(gang, order, tmp_path / "rebuilt")
        assert all(tier != BUDDY for node in gang.nodes for tier, *_ in held(gang, node))
        (expected,), (found,) = ((tmp_path / name).iterdir() for name in ("whole", "rebuilt"))
        files = sorted(path.name for path in expected.glob("*.distcp"))
        assert len(files) == 6
        assert all((found / name).read_bytes() == (expected / name).read_bytes() for name in files)
        await gang.lose("n5")
        with pytest.raises(
            FlushError, match=r"rank 4's shard of step 2 of generation 1 can't be rebuilt: of the parity"
        ):
            await flush_all(gang, flush_order(gang, Version(1, 2), None), tmp_path / "rebuilt")


async def test_a_flush_rebuilds_when_all_have_declared_and_nobody_counts_on_what_it_rebuilds(tmp_path: Path) -> None:
    async with gang_with_parities() as gang:
        await gang.lose("n4")
        writer = gang.nodes["n3"]
        writer.transport.flows.clear()
        first = flush_order(gang, Version(1, 2), None)
        running = asyncio.ensure_future(flush_all(gang, first, tmp_path))
        await until(lambda: sum(path.name.startswith("1-2-") for path in tmp_path.glob(".flush-*/*")) == 5)
        await until(lambda: (done := writer.checkpoint_service.flush_progress()) is not None and done.total > 0)
        assert all(tier != BUDDY for tier, *_ in held(gang, "n3"))
        second = flush_order(gang, Version(1, 2), None)
        second.serial = first.serial + 1
        again = asyncio.ensure_future(flush_all(gang, second, tmp_path))
        with pytest.raises(FlushError, match="a newer flush was ordered"):
            await running
        writer.transport.flows.set()
        await again
        done = writer.checkpoint_service.flush_progress()
        assert done is not None
        assert done.written == done.total > len(sharded(2)(4))
        assert len(list(tmp_path.glob("step_*/*.distcp"))) == 6


async def test_shards_of_other_sizes_and_ranks_with_several_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on each node, whose states differ in size: the shards of a group have other numbers of pieces. One is
    rebuilt after the other, in little staging memory."""
    monkeypatch.setattr(parity_restore, "REBUILDS_AT_ONCE", 1)
    monkeypatch.setattr(parity_restore, "WINDOW_PIECES", 1)
    staging: list[SealedMemory] = []
    most = 0

    def staging_memory(name: str, size: int, **given: bool) -> SealedMemory:
        nonlocal most
        staging.append(SealedMemory(name, size, **given))
        most = max(most, sum(memory.fd >= 0 for memory in staging))
        return staging[-1]

    monkeypatch.setattr(parity_restore, "SealedMemory", staging_memory)
    places = {rank: f"n{rank // 2}" for rank in range(6)}
    sizes = {rank: (3 << 20) * (1 + rank % 4) + 11 * rank for rank in places}
    state = {rank: (sharded(rank)(rank) * 3)[: sizes[rank]] for rank in places}
    async with running_gang() as gang:
        gang.parity_groups = (("n0", "n1", "n2"),)
        await gang.add("n0", "n1", "n2", "spare0")
        await gang.run(places, size=0)
        for rank, one in gang.ranks.items():
            assert not await asyncio.to_thread(one.layout, sizes[rank])
        await gang.step(1, lambda rank: state[rank])
        await gang.committed(Version(1, 1))
        await gang.lose("n1")
        moved = {rank: "spare0" if node == "n1" else node for rank, node in places.items()}
        starts = await gang.run(moved, gang.plan(Version(1, 1)), size=0)
        for rank, start in starts.items():
            assert start.shard is not None
            assert contents(start.shard)["shared"][: sizes[rank]] == state[rank]
    assert most == parity_restore.WINDOWS_AT_ONCE < len(staging)
    assert {memory.size for memory in staging} == {PIECE_BYTES}
    assert all(memory.fd < 0 for memory in staging)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=7))
def test_each_piece_of_each_shard_is_in_one_part_that_another_node_holds(counts: list[int]) -> None:
    """`counts`: the pieces of each rank's shard."""
    ranks = tuple(range(10, 10 + len(counts)))
    for rank, count in zip(ranks, counts, strict=True):
        keys = [PartKey(Version(1, 1), ranks, part) for part in range(len(ranks)) if ranks[part] != rank]
        numbers = [key.number(rank, position) for key in keys for position in range(key.share(rank, count))]
        assert sorted(numbers) == list(range(count))
        assert max(key.share(rank, count) for key in keys) == -(-count // (len(ranks) - 1))


@given(st.data())
def test_a_part_is_the_xor_of_what_was_added_in_any_order_and_more_than_once(data: st.DataObject) -> None:
    """Four ranks, of which the part combines three. Its memory is replaced by larger memory somewhere in between."""
    key = PartKey(Version(1, 1), (0, 1, 2, 3), 2)
    shard = st.lists(st.binary(min_size=1, max_size=40), min_size=3, max_size=9)
    shards = {rank: data.draw(shard) for rank in key.combined}
    freed: list[int] = []
    part = ParityPart(key, SealedMemory("a", PIECE_BYTES, sparse=True), 1, lambda memory, count: freed.append(count))
    for rank, contents_of in shards.items():
        part.begin_rank(rank, tuple(Piece(0, len(c), digest_of(memoryview(c))) for c in contents_of))
    part.replace_memory(SealedMemory("b", 3 * PIECE_BYTES, sparse=True), 3)
    part.replace_memory(SealedMemory("c", 2 * PIECE_BYTES, sparse=True), 2)
    assert part.capacity == 3
    expected: dict[int, bytes] = {}
    steps = []
    for rank, contents_of in shards.items():
        for position in range(key.share(rank, len(contents_of))):
            content = contents_of[key.number(rank, position)]
            steps.append((rank, position, content))
            before = expected.get(position, b"")
            size = max(len(before), len(content))
            both = int.from_bytes(before.ljust(size, b"\0")) ^ int.from_bytes(content.ljust(size, b"\0"))
            expected[position] = both.to_bytes(size)
    left, whole = {(rank, position) for rank, position, _ in steps}, 0
    for rank, position, content in data.draw(st.permutations(steps + steps[::2])):
        part.add(rank, [(position, memoryview(content))])
        left.discard((rank, position))
        whole += bool(part.try_complete())
        assert whole == (not left), "it is whole once, when all has been added"
    assert part.shard is not None
    found = [bytes(part.shard.piece(number)) for number in range(len(part.shard.pieces))]
    assert found == [expected[position] for position in sorted(expected)]
    assert part.shard.corrupt_pieces() == []
    assert part.status().digests[2] == ""
    part.drop()
    part.drop()
    assert freed == [3]
    with pytest.raises(PartDropped):
        part.add(0, [(0, memoryview(b"late"))])


def test_an_order_names_the_parts_of_each_node() -> None:
    order = agent_pb2.Order(parity_groups=[common_pb2.ParityGroup(nodes=["b", "a"]), common_pb2.ParityGroup(nodes="c")])
    order.places.extend(agent_pb2.RankPlace(rank=rank, node="abc"[rank // 2]) for rank in range(6))
    places = places_of_order(order, "a")
    assert places.shards_sent == {0: (Place("b", (2, 0), 0),), 1: (Place("b", (3, 1), 0),)}
    assert places.parts == (Place("a", (2, 0), 1), Place("a", (3, 1), 1))
    assert places.share_of_parts == 2
    alone = places_of_order(order, "c")
    assert (alone.shards_sent, alone.parts) == ({4: (), 5: ()}, ())


def test_an_order_names_the_holders_of_whole_copies() -> None:
    order = agent_pb2.Order(
        members=[
            common_pb2.Member(node="a", buddy="b", more_buddies=["c"]),
            common_pb2.Member(node="b", buddy="c", more_buddies=["a"]),
            common_pb2.Member(node="c"),
        ]
    )
    order.places.extend(agent_pb2.RankPlace(rank=rank, node="abc"[rank // 2]) for rank in range(6))
    places = places_of_order(order, "a")
    assert places.shards_sent == dict.fromkeys((0, 1), (Place("b"), Place("c")))
    assert places.sent(5) == (Place("b"), Place("c")), "what only this node has left goes to its own holders"
    assert (places.copied_ranks, places.parts) == ((2, 3), ())
    assert places_of_order(order, "c").copied_ranks == (0, 1, 2, 3)


async def test_impossible_offers_are_refused_and_leave_nothing() -> None:
    async with running_gang() as gang:
        await gang.add("n0")
        service = gang.nodes["n0"].checkpoint_service
        offer = peer_pb2.ShardOffer(
            gang_id=gang.gang_id, node="n1", rank=1, version=common_pb2.Version(generation=1, step=1), bytes=3
        )
        piece = Piece(0, 3, digest_of(memoryview(b"abc")))
        offer.pieces.add(offset=0, length=3, digest=piece.digest, data=b"abc")
        offer.digest = shard_digest([piece])
        for ranks, part in (([0, 1], 1), ([0, 1], 2), ([1, 1], 0), ([0, 2], 0), ([1], 0), ([], 0)):
            offer.parity.CopyFrom(peer_pb2.ParityPart(ranks=ranks, part=part))
            answer = await gang.dial("n0", gang.nodes["n0"].address).Offer(offer)
            assert "names an impossible parity" in answer.refused
        offer.gang_id = "other"
        assert "belongs to gang" in (await gang.dial("n0", gang.nodes["n0"].address).Offer(offer)).refused
        assert not service.combined()


async def test_an_agent_without_numpy_gives_no_slots_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    exclusive_or.load.cache_clear()
    with pytest.raises(exclusive_or.NoNumpy, match=r"parities need numpy, and the agents' Python has none"):
        exclusive_or.load()
    async with running_gang() as gang:
        gang.parity_groups = GROUPS
        await gang.add(*SIX.values())
        await gang.run(SIX, size=0)
        refused = await asyncio.to_thread(gang.ranks[1].layout, 1 << 20)
        assert refused.startswith("parities need numpy")
        await until(lambda: gang.nodes["n1"].checkpoint_service.no_slots.startswith("parities need numpy"))
    monkeypatch.undo()
    exclusive_or.load.cache_clear()
