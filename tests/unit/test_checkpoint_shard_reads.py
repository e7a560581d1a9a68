"""Ranges of another world size's shards, from the memory of several nodes: each piece once, and nothing unverified."""

import asyncio
import pickle
import random
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

import pytest

from muster.checkpoint.format import layout
from muster.checkpoint.format.durable_folders import METADATA as METADATA_FILE
from muster.checkpoint.format.durable_folders import folder_name, rank_file_name
from muster.checkpoint.format.errors import RestoreError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.testing.gang_in_one_process import InProcessGang, TorchlessRank
from muster.checkpoint.training import agent_shards
from muster.checkpoint.training.agent_connection import AgentConnection
from muster.checkpoint.training.agent_shards import AgentShards, joined
from muster.v1.agent_pb2 import TIER_OWN, FlushOrder, RestorePlan

PIECE = layout.PIECE_BYTES
SHARED = 2 * PIECE + 1000
"""Bytes of a rank's tensors: three pieces. The object and the header follow in a piece each."""
KEPT = Version(1, 1)
RANKS = 4
METADATA = pickle.dumps(
    [(layout.offset_placeholder(n), layout.length_placeholder(n)) for n in (0, *range(100, 100 + RANKS))], 4
)
"""What stands for the durable metadata: item 0, which rank 0 publishes, and an object of each rank."""


@cache
def tensors(rank: int) -> bytes:
    """What a rank holds; no two pieces are equal."""
    return random.Random(rank).randbytes(SHARED)


class Gang(InProcessGang):
    """Four nodes whose four ranks have committed a sharded version."""

    def __init__(self) -> None:
        super().__init__("g1")
        self.connections: list[AgentConnection] = []

    async def commit(self) -> None:
        await self.add(*(f"n{rank}" for rank in range(RANKS)))
        self.begin({rank: f"n{rank}" for rank in range(RANKS)})
        ranks = [
            TorchlessRank(AgentConnection(self.socket(r, f"n{r}"), r, 1), r, RANKS, b"" if r else METADATA)
            for r in range(RANKS)
        ]
        self.connections += [rank.connection for rank in ranks]
        for number, rank in enumerate(ranks):
            await asyncio.to_thread(rank.join)
            assert not await asyncio.to_thread(rank.layout, SHARED)
            assert await asyncio.to_thread(rank.step, 1, tensors(number), f"object {number}".encode(), 5.0)
        async with asyncio.timeout(60):
            while any(node.committed() != KEPT for node in self.nodes.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    async def reshard(self, *nodes: str, plan: RestorePlan | None = None) -> list[AgentShards]:
        """Start a generation with one rank on each of these nodes: what each rank can read."""
        plan = plan or self.plan(KEPT)
        plan.written_ranks, plan.resharded = RANKS, True
        generation = self.begin(dict(enumerate(nodes)), plan)
        found = []
        for rank, node in enumerate(nodes):
            connection = AgentConnection(self.socket(rank, node), rank, generation)
            self.connections.append(connection)
            start = await asyncio.to_thread(connection.join)
            assert (start.written_ranks, start.step, start.shard) == (RANKS, 1, None)
            found.append(AgentShards(connection))
        return found

    def received(self) -> dict[str, int]:
        return {name: node.received_bytes for name, node in self.nodes.items()}

    def break_slot(self, node: str, rank: int, offset: int) -> None:
        """Flip a byte in the slot of a rank."""
        service = self.nodes[node].checkpoint_service
        shard = next(s for s in service.slot_shards() if s.rank == rank)
        shard.memory.view[offset] ^= 1

    def holders(self, rank: int) -> set[str]:
        return {
            name
            for name, node in self.nodes.items()
            if any(shard.rank == rank for shard in node.checkpoint_service.shards())
        }

    async def close(self) -> None:
        for connection in self.connections:
            connection.close()
        await super().close()


@pytest.fixture
async def gang() -> AsyncIterator[Gang]:
    gang = Gang()
    await gang.commit()
    yield gang
    await gang.close()


async def read(shards: AgentShards, rank: int, first: int, end: int) -> bytes:
    await asyncio.to_thread(shards.bring, {rank: [(first, end)]})
    return bytes(shards.view(rank)[first:end])


async def test_a_rank_reads_headers_and_ranges_of_all_old_ranks(gang: Gang) -> None:
    await gang.lose("n3")  # n0 holds the replica
    for shards in await gang.reshard("n0", "n1"):
        await asyncio.to_thread(shards.bring_headers, range(RANKS))
        assert layout.read_durable_metadata(shards.view(0)) == METADATA
        for rank in range(RANKS):
            assert layout.read_index(shards.view(rank)).rank == rank
            assert await read(shards, rank, 100, 200) == tensors(rank)[100:200]


async def test_only_pieces_that_are_asked_for_come_and_once_for_all_ranks_of_a_node(gang: Gang) -> None:
    before = gang.received()
    one, other = await gang.reshard("n0", "n0")
    assert await read(one, 2, PIECE - 5, PIECE + 5) == tensors(2)[PIECE - 5 : PIECE + 5]
    fetched = gang.received()["n0"] - before["n0"]
    footer_piece = fetched - 2 * PIECE
    assert 0 < footer_piece < 1000, "the first two pieces, and the last one, which tells where all others are"
    assert await read(other, 2, 0, PIECE) == tensors(2)[:PIECE]
    assert gang.received()["n0"] - before["n0"] == fetched, "they are here already"
    assert not any(one.view(2)[2 * PIECE : SHARED]), "nobody has asked for this piece"


async def test_shards_in_this_nodes_memory_need_no_network(gang: Gang) -> None:
    before = gang.received()
    (shards,) = await gang.reshard("n1")
    for rank in (1, 0):  # its own shard, and the replica of the node whose buddy it is
        assert await read(shards, rank, 0, SHARED) == tensors(rank)
    assert gang.received() == before


async def test_the_progress_says_what_came_from_where(gang: Gang) -> None:
    shards, _ = await gang.reshard("n1", "n1")
    service = gang.nodes["n1"].checkpoint_service
    assert await read(shards, 1, 0, PIECE) == tensors(1)[:PIECE]
    await read(shards, 3, 0, 10)
    progress = service.restore_progress()
    assert progress is not None
    assert progress.own_bytes >= PIECE
    assert sum(progress.fetched_bytes.values()) >= PIECE
    assert progress.bytes == progress.own_bytes + progress.copied_bytes + sum(progress.fetched_bytes.values())
    assert (progress.ranks, progress.ranks_done) == (2, 0)


async def test_a_corrupt_piece_of_this_nodes_slot_comes_from_another_node(gang: Gang) -> None:
    (shards,) = await gang.reshard("n1")
    assert await read(shards, 1, 0, 10) == tensors(1)[:10]
    gang.break_slot("n1", 1, PIECE + 7)
    assert await read(shards, 1, PIECE, PIECE + 50) == tensors(1)[PIECE : PIECE + 50]
    assert bytes(shards.view(1)[:10]) == tensors(1)[:10], "what was read before stays readable"
    assert gang.holders(1) == {"n2"}, "the corrupt shard is used no more"


async def test_a_corrupt_piece_of_one_holder_comes_from_the_next(gang: Gang) -> None:
    gang.break_slot("n1", 1, 7)
    (shards,) = await gang.reshard("n3")
    assert await read(shards, 1, 0, PIECE) == tensors(1)[:PIECE]


@pytest.mark.parametrize("reader", ["n1", "n3"])
async def test_a_piece_that_is_corrupt_in_all_copies_is_refused(gang: Gang, reader: str) -> None:
    gang.break_slot("n1", 1, 7)
    plan = gang.plan(KEPT, TIER_OWN)  # the replica on n2 is not named
    (shards,) = await gang.reshard(reader, plan=plan)
    with pytest.raises(RestoreError, match=r"rank 1's shard of .* can't be read"):
        await read(shards, 1, 0, PIECE)


@pytest.mark.parametrize("damages", [1, 2])
async def test_pieces_that_arrive_damaged_from_the_last_holder_are_asked_for_again(gang: Gang, damages: int) -> None:
    await gang.lose("n2")
    (shards,) = await gang.reshard("n0")  # n3 has the only copy of rank 2's shard
    await asyncio.to_thread(shards.bring_headers, [2])
    gang.nodes["n0"].transport.damages = damages
    assert await read(shards, 2, 0, SHARED) == tensors(2)
    (found,) = gang.nodes["n0"].checkpoint_service.corrupt_copies()
    assert (found.rank, found.pieces, found.from_node) == (2, 1, "n3")
    progress = gang.nodes["n0"].checkpoint_service.restore_progress()
    assert progress is not None
    assert sum(progress.fetched_bytes.values()) == progress.bytes, "nothing comes twice"


async def test_of_a_corrupt_slot_only_the_changed_piece_comes_from_elsewhere(gang: Gang) -> None:
    gang.break_slot("n1", 1, PIECE + 7)
    (shards,) = await gang.reshard("n1")
    before = gang.received()["n1"]
    await read(shards, 1, 0, PIECE)
    assert await read(shards, 1, PIECE, 2 * PIECE) == tensors(1)[PIECE : 2 * PIECE]
    assert gang.received()["n1"] - before == PIECE, "the pieces that match are copied"


async def test_a_holder_that_is_gone_is_left_out(gang: Gang) -> None:
    plan = gang.plan(KEPT)
    await gang.lose("n2")
    (shards,) = await gang.reshard("n0", plan=plan)
    assert await read(shards, 2, 0, SHARED) == tensors(2)


async def test_a_shard_without_a_holder_is_refused(gang: Gang) -> None:
    await gang.lose("n2")
    await gang.lose("n3")  # it held the replica
    (shards,) = await gang.reshard("n0")
    with pytest.raises(RestoreError, match="no source holds it"):
        await read(shards, 2, 0, PIECE)


@pytest.mark.parametrize(
    ("rank", "first", "end", "words"),
    [(RANKS, 0, 10, "4 ranks wrote"), (1, 0, 1 << 40, "has no bytes"), (1, 1 << 40, 1 << 41, "has no bytes")],
)
async def test_what_no_shard_has_is_refused(gang: Gang, rank: int, first: int, end: int, words: str) -> None:
    (shards,) = await gang.reshard("n0")
    with pytest.raises(RestoreError, match=words):
        await read(shards, rank, first, end)


async def test_the_memory_is_let_go_when_all_ranks_of_the_node_have_their_states(gang: Gang) -> None:
    one, other = await gang.reshard("n0", "n0")
    await read(one, 2, 0, PIECE)
    before = gang.received()
    with one:
        pass
    await read(other, 2, 0, PIECE)
    assert gang.received() == before, "another rank may still need it"
    with other:
        pass
    await read(one, 2, 0, PIECE)
    assert gang.received() != before


async def test_a_fence_ends_reads(gang: Gang) -> None:
    (shards,) = await gang.reshard("n0")
    transport = gang.nodes["n0"].transport
    transport.flows.clear()
    earlier = transport.fetches
    reading = asyncio.create_task(read(shards, 2, 0, PIECE))
    async with asyncio.timeout(60):
        while transport.fetches == earlier:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    (again,) = await gang.reshard("n0")
    with pytest.raises(RestoreError, match="the agent ended"):
        await reading
    transport.flows.set()
    assert transport.cancelled == 1
    assert await read(again, 2, 0, PIECE) == tensors(2)[:PIECE]


async def test_shards_of_a_node_that_is_gone_have_two_copies_again_after_the_first_step(gang: Gang) -> None:
    await gang.lose("n3")
    assert (gang.holders(3), gang.holders(0)) == ({"n0"}, {"n0", "n1"})
    await gang.reshard("n0", "n1")
    for connection in gang.connections[-2:]:
        connection.report_progress(2)
    async with asyncio.timeout(60):
        while gang.holders(3) != {"n0", "n1"}:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    assert gang.holders(0) == {"n0", "n1"}


async def test_the_version_of_all_old_ranks_can_be_written_before_the_next_commit(gang: Gang, tmp_path: Path) -> None:
    await gang.reshard("n0", "n1")
    order = FlushOrder(serial=1, version=KEPT.to_wire(), sources=gang.plan(KEPT, TIER_OWN).sources, reason="test")
    await asyncio.gather(*(n.checkpoint_service.flush(order, str(tmp_path)) for n in gang.nodes.values()))
    folder = tmp_path / folder_name(KEPT, "g1")
    assert {rank_file_name(rank) for rank in range(RANKS)} < {path.name for path in folder.iterdir()}
    places = pickle.loads((folder / METADATA_FILE).read_bytes())
    start, length = places[0]
    assert (folder / rank_file_name(0)).read_bytes()[start : start + length] == tensors(0)


async def test_many_ranges_come_in_several_messages(gang: Gang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_shards, "MAX_RANGES", 1)
    (shards,) = await gang.reshard("n0")
    shards_of_all = {rank: [(10, 20), (PIECE + 500, PIECE + 510)] for rank in range(RANKS)}
    await asyncio.to_thread(shards.bring, shards_of_all)
    for rank, spans in shards_of_all.items():
        assert all(bytes(shards.view(rank)[a:b]) == tensors(rank)[a:b] for a, b in spans)


def test_spans_are_joined_where_no_whole_piece_lies_between_them() -> None:
    assert joined([(PIECE + 5, PIECE + 9), (0, 6), (4, 10)]) == [(0, PIECE + 9)]
    assert joined([(0, 10), (PIECE + 10, PIECE + 20)]) == [(0, 10), (PIECE + 10, PIECE + 20)]
