"""Mapped memory of which no page is missing."""

import os
import resource

import pytest

from muster.checkpoint.format import touched_memory
from muster.checkpoint.format.touched_memory import map_touched

SIZE = (4 << 20) + 100


@pytest.fixture
def descriptor() -> int:
    made = os.memfd_create("touched", os.MFD_CLOEXEC)
    os.ftruncate(made, SIZE)
    return made


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_the_bytes_stay_and_are_shared(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touched_memory, "CHUNK_BYTES", 1 << 20)
    os.pwrite(descriptor, b"last", SIZE - 4)
    with map_touched(descriptor, SIZE) as mapping:
        assert mapping[-4:] == b"last"
        mapping[:5] = b"first"
        assert os.pread(descriptor, 5, 0) == b"first"


@pytest.mark.skipif(tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14), reason="needs Linux 5.14")
def test_no_page_is_missing(descriptor: int) -> None:
    ones = b"\1" * SIZE
    with map_touched(descriptor, SIZE) as mapping:
        before = faults()
        mapping[:] = ones
        assert faults() - before < SIZE // 4096 // 4
