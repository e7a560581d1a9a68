"""One rank's file of a flush: every byte is verified, published or not, and the note says where each item is."""

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.checkpoint.durable import posix_folder
from muster.checkpoint.durable.durable_store import Entry
from muster.checkpoint.durable.posix_folder import PosixFolder, WriteBack
from muster.checkpoint.format import block_digests, layout
from muster.checkpoint.format.errors import CorruptShard, FlushError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.flush import flush_publish
from muster.checkpoint.store.flush.flush_part import FlushPart
from muster.checkpoint.store.flush.give_up import FlushCancellation
from muster.checkpoint.store.flush.rank_file import write_rank_file
from muster.checkpoint.store.flush.rank_source import RankSource
from muster.checkpoint.store.flush.written_bytes import WrittenBytes
from muster.checkpoint.store.memory.pieces import Piece, digest_of, shard_digest
from muster.checkpoint.store.memory.sealed_memory import SealedMemory
from muster.checkpoint.store.memory.shards import Shard
from muster.v1.agent_pb2 import TIER_OWN


@dataclass(frozen=True)
class Content:
    """What a shard holds. `tensors`, `objects`: the bytes of its items; `shared`: the first tensor has two names."""

    tensors: list[bytes]
    objects: list[bytes]
    shared: bool
    piece_bytes: int


CONTENTS = st.builds(
    Content,
    tensors=st.lists(st.binary(min_size=1, max_size=700), min_size=1, max_size=5),
    objects=st.lists(st.binary(max_size=90), max_size=3),
    shared=st.booleans(),
    piece_bytes=st.integers(50, 900),
)


@contextmanager
def shard_of(content: Content) -> Iterator[tuple[Shard, list[bytes]]]:
    """A shard, and the bytes of its published items by their numbers."""
    items, places, end = [], [], 0
    for data in content.tensors:
        places.append((end, data))
        items.append(layout.PublishedItem(len(items), end, len(data)))
        end = layout.align_up(end + len(data))
    if content.shared:
        items.append(layout.PublishedItem(len(items), 0, len(content.tensors[0])))
    objects_offset, objects = end, []
    for data in content.objects:
        objects.append((end, data))
        items.append(layout.PublishedItem(len(items), end, None))
        end = layout.align_up(end + layout.LENGTH_BYTES + len(data))
    index = layout.ShardIndex(3, 8, tuple(items)).dump()
    memory = SealedMemory("shard", layout.align_up(end + len(index)) + layout.FOOTER_BYTES)
    for offset, data in places:
        memory.view[offset : offset + len(data)] = data
    for offset, data in objects:
        layout.write_object(memory.view, offset, data)
    memory.view[end : end + len(index)] = index
    layout.write_footer(memory.view, layout.Footer(objects_offset, end, len(index), 0, 0))
    pieces = tuple(
        Piece(start, length := min(content.piece_bytes, memory.size - start), digest_of(memory.view[start:][:length]))
        for start in range(0, memory.size, content.piece_bytes)
    )
    shard = Shard(3, Version(2, 5), TIER_OWN, pieces, shard_digest(pieces), memory, memory.close)
    published = [*content.tensors, *content.tensors[: content.shared], *content.objects]
    try:
        yield shard, published
    finally:
        shard.release()


@settings(max_examples=40, deadline=None)
@given(content=CONTENTS)
def test_the_note_says_where_each_item_is(content: Content) -> None:
    with shard_of(content) as (shard, published), tempfile.TemporaryDirectory() as folder:
        counted = WrittenBytes()
        note = write_rank_file(PosixFolder(Path(folder)), "file", RankSource(shard), lambda: None, counted)
        written = Path(folder, "file").read_bytes()
        assert counted.done == counted.total == len(written)
        assert [written[offset : offset + length] for _, offset, length in note.items] == published
        assert [number for number, *_ in note.items] == list(range(len(published)))
        assert (note.rank, note.world_size, note.file_bytes) == (3, 8, len(written))
        assert note.file_digest == xxhash.xxh3_128_hexdigest(written)
        assert note.data_bytes == sum(map(len, [*content.tensors, *content.objects]))
        digests = written[note.data_bytes :]
        assert digests == xxhash.xxh3_128_digest(written[: note.data_bytes]), "there is one block"
        assert note.blocks_digest == xxhash.xxh3_128_hexdigest(digests)


@settings(max_examples=40, deadline=None)
@given(content=CONTENTS, data=st.data())
def test_a_flipped_bit_anywhere_is_found(content: Content, data: st.DataObject) -> None:
    with shard_of(content) as (shard, _), tempfile.TemporaryDirectory() as folder:
        shard.memory.view[data.draw(st.integers(0, shard.bytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
        with pytest.raises(CorruptShard):
            write_rank_file(PosixFolder(Path(folder)), "file", RankSource(shard), lambda: None, WrittenBytes())


def test_a_flush_can_be_given_up(tmp_path: Path) -> None:
    class GivenUp(Exception):
        pass

    content = Content([bytes(3000)], [], shared=False, piece_bytes=400)
    with shard_of(content) as (shard, _):
        left = iter([None, None])

        def give_up() -> None:
            if next(left, GivenUp) is GivenUp:
                raise GivenUp

        counted = WrittenBytes()
        with pytest.raises(GivenUp):
            write_rank_file(PosixFolder(tmp_path), "part", RankSource(shard), give_up, counted)
        assert (tmp_path / "part").stat().st_size == counted.done <= 800
        assert counted.total == 3000 + block_digests.DIGEST_BYTES


def test_bytes_are_on_disk_but_for_a_bounded_number(tmp_path: Path) -> None:
    told: list[tuple[tuple[int, int], bool]] = []
    store = PosixFolder(
        tmp_path, WriteBack(1000, lambda _, part, flags: told.append((part, flags == posix_folder.WRITE)))
    )
    content = Content([bytes(6000)], [], shared=False, piece_bytes=400)
    with shard_of(content) as (shard, _):
        write_rank_file(store, "whole", RankSource(shard), lambda: None, WrittenBytes())
    begun = [part for part, begins in told if begins]
    assert begun == [(start, 1200) for start in range(0, 6000, 1200)]
    assert [part for part, begins in told if not begins] == begun[: -posix_folder.WRITE_BACKS_UNDER_WAY]


def test_an_error_of_the_disk_that_is_told_early_ends_the_file(tmp_path: Path) -> None:
    def full(descriptor: int, part: tuple[int, int], flags: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = PosixFolder(tmp_path, WriteBack(1000, full))
    content = Content([bytes(6000)], [], shared=False, piece_bytes=400)
    with shard_of(content) as (shard, _), pytest.raises(OSError, match="No space left"):
        write_rank_file(store, "whole", RankSource(shard), lambda: None, WrittenBytes())


def test_a_file_that_is_written_back_early_has_its_bytes(tmp_path: Path) -> None:
    store = PosixFolder(tmp_path, WriteBack(4096))
    content = Content([bytes(range(256)) * 100], [b"an object"], shared=True, piece_bytes=5000)
    with shard_of(content) as (shard, _):
        write_rank_file(store, "file", RankSource(shard), lambda: None, WrittenBytes())
    data = bytes(range(256)) * 100 + b"an object"
    assert (tmp_path / "file").read_bytes() == data + xxhash.xxh3_128_digest(data)


def test_a_leader_waits_as_long_as_files_grow(tmp_path: Path) -> None:
    """It looks at the sizes when its time is over, and gives up when nothing has changed since it last did."""
    store = PosixFolder(tmp_path)
    part = FlushPart(Version(1, 1), 1, store, "g1", "a test", True, ".flush-g1-1", FlushCancellation())
    store.make_folder(part.working_folder)
    looks = []

    class Growing(PosixFolder):
        def entries(self, folder: str = "") -> list[Entry]:
            looks.append(folder)
            return [Entry("__1_0.distcp", min(len(looks), 3), True)]

    growing = replace(part, store=Growing(tmp_path))
    with pytest.raises(FlushError, match=r"of ranks \[0, 1\] nothing more came to .* for -1 s"):
        flush_publish._wait_for_notes(growing, 2, timeout_s=-1.0)
    assert looks == [part.working_folder] * 4
