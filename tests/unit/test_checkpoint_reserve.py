"""Memory that a node without ranks keeps ready."""

import fcntl
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.checkpoint.store.memory.reserve import MemoryReserve
from muster.checkpoint.store.memory.sealed_memory import MEMFD_SEALS, NoMemoryLeft, SealedMemory, available_bytes

MIB = 1 << 20


def kept() -> int:
    """Memfds of reserves that this process maps."""
    return len(re.findall(r"memfd:muster-reserve-test-reserve", Path("/proc/self/maps").read_text()))


def reserve(available: Callable[[], int] = available_bytes) -> MemoryReserve:
    return MemoryReserve("reserve-test", available)


def test_what_is_taken_has_exactly_the_size_that_is_asked_for() -> None:
    memory_reserve = reserve()
    memory_reserve.fill(2 * MIB, 2)
    assert memory_reserve.bytes == 4 * MIB
    taken = memory_reserve.take(MIB + 5)
    assert taken is not None
    assert (taken.size, len(taken.view), os.fstat(taken.fd).st_size) == (MIB + 5, MIB + 5, MIB + 5)
    assert fcntl.fcntl(taken.fd, fcntl.F_GET_SEALS) & MEMFD_SEALS == MEMFD_SEALS
    taken.view[-1] = 7
    assert SealedMemory.adopt(os.dup(taken.fd)).view[-1] == 7
    assert memory_reserve.bytes == 2 * MIB
    assert memory_reserve.take(2 * MIB + 1) is None
    assert memory_reserve.take(2 * MIB) is not None
    assert memory_reserve.take(1) is None


def test_another_size_replaces_what_was_kept() -> None:
    memory_reserve = reserve()
    memory_reserve.fill(MIB, 3)
    memory_reserve.fill(2 * MIB, 2)
    assert (memory_reserve.bytes, kept()) == (4 * MIB, 2)
    memory_reserve.fill(2 * MIB, 2)
    assert kept() == 2
    memory_reserve.drop()
    assert (memory_reserve.bytes, kept()) == (0, 0)
    memory_reserve.fill(MIB, 1)
    assert memory_reserve.bytes == MIB
    memory_reserve.close()
    assert kept() == 0


def test_nothing_is_kept_that_the_node_has_not() -> None:
    left = iter([3 * MIB, MIB])
    memory_reserve = reserve(lambda: next(left))
    with pytest.raises(NoMemoryLeft, match="3 times 2 MiB can't be kept ready"):
        memory_reserve.fill(2 * MIB, 3)
    assert memory_reserve.bytes == 2 * MIB


def test_the_end_of_a_node_frees_what_is_being_made() -> None:
    filling, ended = threading.Event(), threading.Event()

    def available() -> int:
        filling.set()
        ended.wait()
        return 1 << 40

    memory_reserve = reserve(available)
    thread = threading.Thread(target=memory_reserve.fill, args=(MIB, 2))
    thread.start()
    filling.wait()
    memory_reserve.close()
    ended.set()
    thread.join()
    assert kept() == 0


@pytest.mark.parametrize(("act", "left"), [("drop", 0), ("take", 2)])
def test_ranks_that_have_their_slots_end_what_is_being_made(act: str, left: int) -> None:
    """A spare gets ranks while it still fills its reserve."""
    filling, ended = threading.Event(), threading.Event()
    asked: list[int] = []

    def available() -> int:
        asked.append(1)
        if len(asked) == 2:
            filling.set()
            ended.wait()
        return 1 << 40

    memory_reserve = reserve(available)
    thread = threading.Thread(target=memory_reserve.fill, args=(MIB, 3))
    thread.start()
    filling.wait()
    if act == "drop":
        memory_reserve.drop()
    else:
        taken = memory_reserve.take(MIB)
        assert taken is not None
        taken.close()
    ended.set()
    thread.join()
    assert kept() == left
