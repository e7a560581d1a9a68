"""Reading a file of a durable checkpoint: any part is what was written, or an error that names file and offset."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.test_checkpoint_object_store import local_objects

from muster.checkpoint.durable import verified_file
from muster.checkpoint.durable.durable_store import DurableStore
from muster.checkpoint.durable.posix_folder import PosixFolder
from muster.checkpoint.durable.verified_file import VerifiedFile
from muster.checkpoint.format import block_digests
from muster.checkpoint.format.block_digests import BlockDigests, trailer_bytes
from muster.checkpoint.format.errors import CorruptCheckpoint

BLOCK = 64
SIZE = 10 * BLOCK + 7
DATA = bytes(n * 7 % 251 for n in range(SIZE))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (verified_file, block_digests):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as threads:
        yield threads


def digests_of(data: bytes, part: int = 50) -> bytes:
    digests = BlockDigests()
    for start in range(0, len(data), part):
        digests.update(memoryview(data)[start : start + part])
    return digests.finish()


def opened(store: DurableStore, threads: ThreadPoolExecutor, digests: bytes | None) -> tuple[VerifiedFile, list[int]]:
    counted: list[int] = []
    return VerifiedFile("/d/file", store.open("file"), SIZE, digests, threads, counted.append), counted


@pytest.mark.parametrize("size", [0, 1, BLOCK, SIZE])
def test_each_block_has_a_digest_however_the_bytes_come(size: int) -> None:
    whole = b"".join(xxhash.xxh3_128_digest(DATA[start : min(size, start + BLOCK)]) for start in range(0, size, BLOCK))
    assert digests_of(DATA[:size]) == digests_of(DATA[:size], 1000) == whole
    assert trailer_bytes(size) == len(whole)


@pytest.mark.parametrize("make_store", [PosixFolder, local_objects], ids=["folder", "objects"])
def test_any_part_can_be_read(tmp_path: Path, make_store, threads: ThreadPoolExecutor) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_bytes(DATA + b"digests")
    for digests in (digests_of(DATA), None):
        file, counted = opened(make_store(tmp_path), threads, digests)
        with file:
            for start in range(0, SIZE, 13):
                for length in (0, 1, 40, BLOCK, 3 * BLOCK + 5, SIZE):
                    file.seek(start)
                    assert file.read(length) == DATA[start : start + length]
            file.seek(-5, 2)
            assert (file.read(), file.tell(), file.read(3)) == (DATA[-5:], SIZE, b"")
        assert sum(counted) > SIZE


@settings(max_examples=40, deadline=None, database=None)
@given(damaged=st.integers(0, SIZE - 1), start=st.integers(0, SIZE - 1), length=st.integers(1, SIZE))
def test_a_damaged_byte_is_found_by_whoever_reads_its_block(
    tmp_path_factory: pytest.TempPathFactory, threads: ThreadPoolExecutor, damaged: int, start: int, length: int
) -> None:
    folder = tmp_path_factory.mktemp("files")
    data = bytearray(DATA)
    data[damaged] ^= 4
    (folder / "file").write_bytes(data)
    file, _ = opened(PosixFolder(folder), threads, digests_of(DATA))
    first = damaged // BLOCK * BLOCK
    last = min(SIZE, first + BLOCK) - 1
    end = min(SIZE, start + length)
    with file:
        file.seek(start)
        if start <= last and end > first:
            with pytest.raises(CorruptCheckpoint, match=f"/d/file is damaged: its bytes {first} to {last} are not"):
                file.read(length)
        else:
            assert file.read(length) == DATA[start:end]


def test_a_file_that_was_cut_meanwhile_is_an_error(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    (tmp_path / "file").write_bytes(DATA)
    file, _ = opened(PosixFolder(tmp_path), threads, digests_of(DATA))
    (tmp_path / "file").write_bytes(DATA[:100])
    with file, pytest.raises(OSError, match="the file ends at 100"):
        file.read(SIZE)
