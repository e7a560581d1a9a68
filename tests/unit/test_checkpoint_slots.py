"""Sealed memory, slots, and who holds a shard."""

import fcntl
import mmap
import os
from pathlib import Path

import pytest

from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory.shards import Piece, Shard, ShardStore
from muster.checkpoint.store.memory.slots import NoMemoryLeft, SealedMemory, SlotPool, available_bytes
from muster.v1.agent_pb2 import TIER_BUDDY, TIER_OWN


def test_nobody_can_shrink_or_grow_a_slot() -> None:
    memory = SealedMemory("muster-g-r0-s1", 8192)
    try:
        for size in (0, 4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        memory.close()


def test_a_slot_bears_its_name() -> None:
    memory = SealedMemory("muster-g-r3-s2", 4096)
    assert os.readlink(f"/proc/self/fd/{memory.fd}").startswith("/memfd:muster-g-r3-s2")
    memory.close()


def test_a_restored_shard_can_only_be_read_through_its_descriptor() -> None:
    memory = SealedMemory("muster-g-r0-s1", 4096)
    descriptor = memory.read_only()
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 4096)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(descriptor, b"x")
        with mmap.mmap(descriptor, 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as private:
            private[0] = 7
        assert memory.view[0] == 0
    finally:
        os.close(descriptor)
        memory.close()


def test_sparse_memory_takes_pages_as_they_are_written_and_gives_them_back() -> None:
    memory = SealedMemory("muster-g-r0-b1", 64 << 20, sparse=True)
    assert os.fstat(memory.fd).st_blocks == 0
    memory.view[: 8 << 20] = bytes(8 << 20)
    assert os.fstat(memory.fd).st_blocks * 512 == 8 << 20
    memory.forget(100, (8 << 20) - 100)
    assert os.fstat(memory.fd).st_blocks * 512 == 4096
    memory.close()


def test_more_than_there_is_is_refused_in_words() -> None:
    with pytest.raises(NoMemoryLeft, match=r"huge needs 1048576 MiB, and \d+ MiB are left to this job on this node"):
        SealedMemory("huge", 1 << 40)


def proc(tmp_path: Path, available_kb: int, group: str = "/job") -> Path:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {available_kb} kB\n")
    (tmp_path / "self/cgroup").write_text(f"0::{group}\n")
    return tmp_path


@pytest.mark.parametrize("where", ["job", "job/step/task"])
@pytest.mark.parametrize(("limit", "left"), [("max", 1 << 20), (str(5 << 10), 5 << 10), (str(1 << 40), 1 << 20)])
def test_room_is_what_node_and_job_both_leave(tmp_path: Path, limit: str, left: int, where: str) -> None:
    (tmp_path / "cgroup" / where).mkdir(parents=True)
    group = tmp_path / "cgroup/job"
    (group / "memory.max").write_text(limit + "\n")
    (group / "memory.current").write_text("4096\n")
    # Of what is used, 4096 bytes are files that are no shared memory: they make way.
    (group / "memory.stat").write_text("anon 0\nfile 5096\nshmem 1000\n")
    folder = tmp_path / "proc"
    folder.mkdir()
    assert available_bytes(proc(folder, 1024, f"/{where}"), tmp_path / "cgroup") == left


def test_room_without_a_limit_is_the_nodes(tmp_path: Path) -> None:
    assert available_bytes(proc(tmp_path, 2), tmp_path / "nothing") == 2048


class Rank:
    """Slots of one rank, and what was said of them."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.slots = SlotPool("g", self.freed.append)

    def deal(self, size: int = 4096) -> list[int]:
        fresh = [self.slots.make(0, size) for _ in range(2 - self.slots.fitting(0, size))]
        return [slot.memory.fd for slot in self.slots.deal(0, size, fresh)]


def test_slots_are_dealt_again_with_what_they_hold_first() -> None:
    rank = Rank()
    first = rank.deal()
    full = rank.slots.fill(0, 1)
    assert full is not None
    again = rank.deal()
    assert again == first[::-1]
    assert full.fills == 0
    assert rank.slots.spare(0).number == 1
    assert full.number == 0
    rank.slots.close()


def test_a_slot_of_another_size_goes_when_it_is_free() -> None:
    rank = Rank()
    rank.deal()
    full = rank.slots.fill(0, 0)
    assert full is not None
    rank.deal(8192)
    assert full.memory.fd >= 0
    rank.slots.free(full)
    assert full.memory.fd < 0
    assert rank.freed == [], "the rank doesn't know it any more"
    rank.slots.close()


def test_a_full_slot_is_not_filled_again() -> None:
    rank = Rank()
    rank.deal()
    slot = rank.slots.fill(0, 0)
    assert slot is not None
    assert rank.slots.fill(0, 0) is None
    assert rank.slots.fill(0, 2) is None
    rank.slots.free(slot)
    assert rank.freed == [0]
    assert rank.slots.fill(0, 0) is slot
    rank.slots.close()


def shard(gone: list[str], word: str, tier: int = TIER_OWN, step: int = 1) -> Shard:
    memory = SealedMemory(word, 4096, sparse=True)
    pieces = (Piece(0, 4096, word.encode()),)
    return Shard(0, Version(1, step), tier, pieces, bytes(16), memory, lambda: gone.append(word))


def test_a_shard_goes_when_its_last_holder_lets_go() -> None:
    gone: list[str] = []
    shard_store = ShardStore(lambda: None)
    own = shard(gone, "own")
    shard_store.put(own)
    with own.held():
        shard_store.drop(lambda s: True, "test")
        assert gone == []
    assert gone == ["own"]
    with pytest.raises(RuntimeError, match="given back"):
        own.hold()


def test_a_lender_stays_as_long_as_the_copy() -> None:
    gone: list[str] = []
    shard_store = ShardStore(lambda: None)
    own, copy = shard(gone, "own"), shard(gone, "copy", TIER_BUDDY)
    copy.borrowed[0] = (own.hold(), 0)
    own.memory.view[:3] = b"abc"
    assert bytes(copy.piece(0)[:3]) == b"abc"
    shard_store.put(own)
    shard_store.put(copy)
    shard_store.drop(lambda s: s.tier == TIER_OWN, "test")
    assert gone == []
    shard_store.drop(lambda s: True, "test")
    assert gone == ["copy", "own"]


def test_a_bad_lender_takes_its_borrowers_along() -> None:
    gone: list[str] = []
    changes: list[int] = []
    shard_store = ShardStore(lambda: changes.append(1))
    own, copy, other = shard(gone, "own"), shard(gone, "copy", TIER_BUDDY), shard(gone, "other", TIER_BUDDY, 2)
    copy.borrowed[0] = (own.hold(), 0)
    for one in (own, copy, other):
        shard_store.put(one)
    shard_store.quarantine(own, "test")
    assert shard_store.all() == [other]
    assert sorted(gone) == ["copy", "own"]
    assert len(changes) == 4
