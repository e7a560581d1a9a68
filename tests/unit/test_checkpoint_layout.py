"""A shard's bytes: footer, index, objects, placeholders, pieces."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.checkpoint.format import layout
from muster.checkpoint.format.errors import CorruptShard, OtherLayout
from muster.checkpoint.format.layout import Footer, PublishedItem, ShardIndex
from muster.checkpoint.store.memory.pieces import (
    Piece,
    digest_of,
    digest_pieces,
    piece_ranges,
    pieces_cover,
    shard_digest,
)
from muster.checkpoint.store.replication import shard_offers
from muster.v1 import peer_pb2


def shard(size: int = 1000, footer: Footer | None = None) -> memoryview:
    view = memoryview(bytearray(size))
    layout.write_footer(view, footer or Footer(256, 512, 10, 20, 30))
    return view


@pytest.mark.parametrize("number", [0, 1, 70_000])
def test_a_placeholder_tells_its_number(number: int) -> None:
    placeholders = layout.offset_placeholder(number), layout.length_placeholder(number)
    assert [layout.number_of_placeholder(placeholder) for placeholder in placeholders] == [number, number]


def test_a_footer_is_read_back() -> None:
    assert layout.read_footer(shard()) == Footer(256, 512, 10, 20, 30)


@pytest.mark.parametrize(
    "footer",
    [Footer(600, 512, 0, 0, 0), Footer(0, 900, 40, 0, 0), Footer(0, 0, 937, 0, 0), Footer(0, 2000, 0, 0, 0)],
)
def test_offsets_outside_the_shard_are_refused(footer: Footer) -> None:
    with pytest.raises(CorruptShard, match="don't fit into 1000 bytes"):
        layout.read_footer(shard(footer=footer))


@pytest.mark.parametrize("size", [0, 63, 64, 1000])
def test_bytes_without_a_footer_are_no_shard(size: int) -> None:
    with pytest.raises(CorruptShard, match="no shard"):
        layout.read_footer(memoryview(bytes(size)))


@given(st.integers(1, 1 << 40))
def test_a_slot_is_little_larger_than_its_state(state_bytes: int) -> None:
    size = layout.slot_bytes(state_bytes)
    assert 0 <= size - state_bytes < max(64 << 10, state_bytes / 64 + 1)
    assert size % (64 << 10) == 0
    assert layout.slot_bytes(size) == size, "states of up to this size have equal slots"
    assert size - state_bytes < layout.PIECE_BYTES


def test_a_shard_of_another_version_of_muster_is_told_from_other_bytes() -> None:
    view = shard()
    view[-64:-56] = b"MUSTERs1"
    with pytest.raises(OtherLayout, match="another version of Muster with layout 1; this version reads layout 2"):
        layout.read_footer(view)


def test_the_parts_at_the_header_are_found() -> None:
    index = ShardIndex(3, 8, (PublishedItem(1, 64, 900), PublishedItem(2, 4096, None)))
    parts = (index.dump(), b"skeleton", b"metadata")
    view = memoryview(bytearray(2048))
    view[1024 : 1024 + sum(map(len, parts))] = b"".join(parts)
    layout.write_footer(view, Footer(512, 1024, *map(len, parts)))
    assert layout.read_index(view) == index
    assert layout.read_leaf_directory(view) == b"skeleton"
    assert layout.read_durable_metadata(view) == b"metadata"


def test_an_object_has_its_present_length() -> None:
    view = memoryview(bytearray(256))
    layout.write_object(view, 64, b"longer")
    layout.write_object(view, 64, b"short")
    assert layout.published_bytes(view, PublishedItem(0, 64, None)) == b"short"
    assert layout.published_bytes(view, PublishedItem(0, 72, 3)) == b"sho"
    view[64:72] = b"\xff" * 8
    with pytest.raises(CorruptShard, match="claims"):
        layout.read_object(view, 64)


places = st.tuples(st.integers(0, 2**62), st.integers(0, 2**62))


@given(st.lists(places, max_size=40))
def test_placeholders_take_any_offset_and_length(given_places: list[tuple[int, int]]) -> None:
    rows = [
        (f"item {n}", layout.offset_placeholder(n), layout.length_placeholder(n), n, "MST")
        for n in range(len(given_places))
    ]
    filled = layout.fill_placeholders(pickle.dumps(rows, 4), dict(enumerate(given_places)))
    assert pickle.loads(filled) == [(f"item {n}", *p, n, "MST") for n, p in enumerate(given_places)]


def test_placeholders_and_places_must_belong_to_one_plan() -> None:
    body = pickle.dumps([layout.offset_placeholder(4), layout.length_placeholder(4)], 4)
    with pytest.raises(CorruptShard, match="no shard holds item 4"):
        layout.fill_placeholders(body, {})
    with pytest.raises(CorruptShard, match=r"items \[5\] are not in the durable metadata"):
        layout.fill_placeholders(body, {4: (0, 0), 5: (0, 0)})


sizes = st.integers(1, 40 << 20)


@given(sizes, st.lists(st.integers(0, 41 << 20), max_size=4))
def test_pieces_cover_a_shard_and_end_at_its_borders(size: int, borders: list[int]) -> None:
    found = [Piece(offset, length, bytes(16)) for offset, length in piece_ranges(size, borders)]
    assert pieces_cover(size, found)
    ends = {p.offset for p in found} | {size}
    assert {b for b in borders if b < size} <= ends


def test_pieces_of_replicas_differ_only_where_their_objects_do() -> None:
    size, footer = 10 << 20, Footer(9 << 20, (9 << 20) + 4096, 100, 0, 0)
    one, other = shard(size, footer), shard(size, footer)
    other[(9 << 20) + 8] = 1
    differ = [a.offset for a, b in zip(digest_pieces(one), digest_pieces(other), strict=True) if a != b]
    assert differ == [9 << 20]


def offer(*pieces: Piece, size: int) -> peer_pb2.ShardOffer:
    said = [peer_pb2.Piece(offset=p.offset, length=p.length, digest=p.digest) for p in pieces]
    return peer_pb2.ShardOffer(node="n1", rank=2, bytes=size, digest=shard_digest(pieces), pieces=said)


@pytest.mark.parametrize(
    ("pieces", "size"),
    [
        ([(0, 10), (11, 9)], 20),
        ([(0, 10), (5, 15)], 20),
        ([(0, 10)], 20),
        ([(0, 10), (10, 0)], 10),
        ([(0, (4 << 20) + 1)], (4 << 20) + 1),
        ([], 10),
        ([], 0),
    ],
)
def test_an_offer_whose_pieces_do_not_cover_the_shard_is_refused(pieces: list[tuple[int, int]], size: int) -> None:
    with pytest.raises(CorruptShard, match="the offer of rank 2 from n1 contradicts itself"):
        shard_offers.pieces_of_offer(offer(*(Piece(a, b, bytes(16)) for a, b in pieces), size=size))


def test_an_offer_with_a_wrong_digest_is_refused() -> None:
    said = offer(Piece(0, 10, digest_of(memoryview(bytes(10)))), size=10)
    assert shard_offers.pieces_of_offer(said)
    said.digest = bytes(16)
    with pytest.raises(CorruptShard):
        shard_offers.pieces_of_offer(said)


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"[" * 100_000,
        b"{}",
        b'{"rank": 0, "world_size": 1, "published": 3}',
        b'{"rank": 0, "world_size": 1, "published": [[0, 0]]}',
        b'{"rank": 0, "world_size": 1, "published": [["0", 0, 1]]}',
        b'{"rank": 0, "world_size": 1, "published": [[0, -1, 1]]}',
        b'{"rank": 0, "world_size": null, "published": []}',
    ],
)
def test_bytes_that_are_no_index_are_refused(index: bytes) -> None:
    with pytest.raises(CorruptShard, match="index of a shard"):
        ShardIndex.load(index)


@pytest.mark.parametrize("item", [PublishedItem(0, 995, None), PublishedItem(0, 2000, None), PublishedItem(0, 990, 11)])
def test_an_item_that_is_not_in_the_shard_is_refused(item: PublishedItem) -> None:
    with pytest.raises(CorruptShard, match="1000"):
        layout.published_bytes(shard(), item)
