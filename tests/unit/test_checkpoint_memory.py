"""Sealed memory, slots, and how long shards are held."""

import errno
import fcntl
import mmap
import os
from pathlib import Path

import pytest

from muster.checkpoint.format.touched_memory import touch
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.memory import sealed_memory
from muster.checkpoint.store.memory.pieces import Piece
from muster.checkpoint.store.memory.sealed_memory import NoMemoryLeft, SealedMemory
from muster.checkpoint.store.memory.shards import Shard, ShardStore
from muster.checkpoint.store.memory.slots import SlotPool
from muster.daemon.host.process.cgroup_memory import MemoryLeft, memory_left, memory_limit, processes_killed
from muster.v1.agent_pb2 import TIER_BUDDY, TIER_OWN, Tier


def test_no_process_can_shrink_or_grow_a_slot() -> None:
    memory = SealedMemory("muster-g-r0-s1", 8192)
    try:
        for size in (0, 4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        memory.close()


def test_a_slot_is_mapped_under_its_name() -> None:
    memory = SealedMemory("muster-g-r3-s2", 4096)
    assert os.readlink(f"/proc/self/fd/{memory.fd}").startswith("/memfd:muster-g-r3-s2")
    memory.close()


def test_a_restored_shard_can_only_be_read_through_its_descriptor() -> None:
    memory = SealedMemory("muster-g-r0-s1", 4096)
    descriptor = memory.open_read_only()
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


def test_sparse_memory_allocates_pages_when_they_are_written_and_frees_them() -> None:
    memory = SealedMemory("muster-g-r0-b1", 64 << 20, sparse=True)
    assert os.fstat(memory.fd).st_blocks == 0
    memory.view[: 8 << 20] = bytes(8 << 20)
    assert os.fstat(memory.fd).st_blocks * 512 == 8 << 20
    memory.free_pages(100, (8 << 20) - 100)
    assert os.fstat(memory.fd).st_blocks * 512 == 4096
    memory.close()


@pytest.mark.parametrize("old_kernel", [False, True])
def test_pages_can_be_allocated_while_bytes_come(old_kernel: bool) -> None:
    memory = SealedMemory("muster-g-r0-s1", (5 << 20) + 7, later=True)
    memory.view[4 << 20 : (4 << 20) + 3] = b"own"
    assert os.fstat(memory.fd).st_blocks * 512 < 1 << 20
    memory.allocate(1 << 20, (lambda address, size: False) if old_kernel else touch)
    assert os.fstat(memory.fd).st_blocks * 512 >= (5 << 20) + 7
    assert memory.view[4 << 20 : (4 << 20) + 4] == b"own\0"
    memory.close()


def test_memory_that_is_closed_meanwhile_is_allocated_no_further() -> None:
    memory = SealedMemory("muster-g-r0-s1", 5 << 20, later=True)
    touched: list[int] = []

    def close_and_touch(address: int, size: int) -> bool:
        touched.append(size)
        memory.close()
        return True

    memory.allocate(1 << 20, close_and_touch)
    assert touched == [1 << 20]


def test_memory_that_is_promised_is_not_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_memory, "memory_left", lambda: MemoryLeft(8 << 20, "a test's limit"))
    first = SealedMemory("muster-g-r0-s1", 5 << 20, later=True)
    with pytest.raises(NoMemoryLeft, match=r"needs 5 MiB, and 3 MiB are left .*a test's limit"):
        SealedMemory("muster-g-r1-s1", 5 << 20, later=True)
    first.close()
    SealedMemory("muster-g-r1-s1", 5 << 20, later=True).close()


def test_memory_that_is_not_available_is_refused_with_the_reason() -> None:
    with pytest.raises(NoMemoryLeft, match=r"huge needs 1048576 MiB, and \d+ MiB are left to this job on this node"):
        SealedMemory("huge", 1 << 40)


def test_memory_without_a_descriptor_left_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def memfd_create(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    with pytest.raises(NoMemoryLeft, match="some of 0 MiB: Too many open files"):
        SealedMemory("some", 4096, sparse=True)


def proc(tmp_path: Path, available_kb: int, *groups: str, total_kb: int = 99) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal: {total_kb} kB\nMemAvailable:   {available_kb} kB\n")
    (folder / "self/cgroup").write_text("".join(f"{group}\n" for group in groups))
    return folder


def limited(group: Path, limit: str, v1: bool) -> None:
    """A cgroup with 4096 bytes in use. Of these, 4096 bytes are files that are no shared memory: they make way."""
    group.mkdir(parents=True, exist_ok=True)
    (group / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(limit + "\n")
    (group / "memory.high").write_text("max\n")
    (group / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text("4096\n")
    stat = "cache 7\nshmem 8\ntotal_cache 5096\ntotal_shmem 1000\n" if v1 else "anon 0\nfile 5096\nshmem 1000\n"
    (group / "memory.stat").write_text(stat)


@pytest.mark.parametrize("where", ["job", "job/step/task"])
@pytest.mark.parametrize(("limit", "left"), [("none", 1 << 20), (str(5 << 10), 5 << 10), (str(1 << 40), 1 << 20)])
@pytest.mark.parametrize("v1", [False, True])
def test_what_is_left_is_the_least_of_what_node_and_job_have_left(
    tmp_path: Path, limit: str, left: int, where: str, v1: bool
) -> None:
    root = tmp_path / "cgroup" / ("memory" if v1 else "")
    limited(root / "job", limit.replace("none", "9223372036854771712" if v1 else "max"), v1)
    (root / where).mkdir(parents=True, exist_ok=True)
    lines = (f"4:memory:/{where}", "1:name=systemd:/", "0::/") if v1 else (f"0::/{where}",)
    found = memory_left(proc(tmp_path, 1024, *lines), tmp_path / "cgroup")
    assert found is not None
    assert found.bytes == left
    assert found.of_bytes == (5 << 10 if left == 5 << 10 else 99 << 10)
    assert (str(root / "job") in found.limit) == (left == 5 << 10)


@pytest.mark.parametrize("v1", [False, True])
def test_a_limit_counts_whatever_is_in_use_of_it(tmp_path: Path, v1: bool) -> None:
    root = tmp_path / "cgroup" / ("memory" if v1 else "")
    limited(root / "job", str(5 << 10), v1)
    limited(root / "job/step", str(7 << 10), v1)
    (root / "job/step" / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(str(7 << 10))
    lines = ("4:memory:/job/step", "0::/") if v1 else ("0::/job/step",)
    found = memory_limit(proc(tmp_path, 1024, *lines), tmp_path / "cgroup")
    assert found is not None
    assert (found.of_bytes, found.limit) == (5 << 10, f"the memory limit of the cgroup {root}/job")


@pytest.mark.parametrize("job", ["s105M8HKECYE00", "job_1"])  # of Slurm 26.05, and with CgroupJobIdPaths=yes
@pytest.mark.parametrize("allowed", ["629145600", "754974720"])
def test_slurm_limits_job_and_step_to_what_was_asked_for_with_version_2(tmp_path: Path, job: str, allowed: str) -> None:
    """The tree of a task with --mem=600. AllowedRAMSpace=120 adds to memory.max, not to memory.high."""
    step = f"system.slice/n0_slurmstepd.scope/{job}/step_0"
    task = tmp_path / "cgroup" / step / "user/task_0"
    for folder in (task, *task.parents[:5]):
        limited(folder, "max", v1=False)
    for folder in (task.parent, task.parents[2]):
        limited(folder, allowed, v1=False)
        (folder / "memory.high").write_text("629145600\n")
    found = memory_limit(proc(tmp_path, 1 << 20, f"0::/{step}/user/task_0", total_kb=1 << 22), tmp_path / "cgroup")
    assert found == MemoryLeft(629145600, f"the memory limit of the cgroup {task.parent}", 629145600)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
        ("job/memory.events", "low 0\nmax 9\noom 4\noom_kill 3\n"),
        ("job/none", ""),
    ],
)
def test_the_kernel_counts_whom_it_kills(tmp_path: Path, file: str, text: str) -> None:
    counts = tmp_path / "cgroup" / file
    counts.parent.mkdir(parents=True)
    counts.write_text(text)
    listing = proc(tmp_path, 1024, "4:memory:/job" if "oom_control" in file else "0::/job")
    assert processes_killed(listing, tmp_path / "cgroup") == (3 if text else 0)


@pytest.mark.parametrize("v1", [False, True])
def test_a_container_s_own_limit_is_at_the_root_of_what_it_sees(tmp_path: Path, v1: bool) -> None:
    """It may show the host's path of its cgroup, which is not there."""
    root = tmp_path / "cgroup" / ("memory" if v1 else "")
    limited(root, str(5 << 10), v1)
    line = f"{'4:memory' if v1 else '0:'}:/docker/0123abcd"
    found = memory_left(proc(tmp_path, 1024, line), tmp_path / "cgroup")
    assert found is not None
    assert found.bytes == 5 << 10


def test_more_in_use_than_the_limit_leaves_nothing(tmp_path: Path) -> None:
    limited(tmp_path / "cgroup/job", "5000", v1=False)
    (tmp_path / "cgroup/job/memory.current").write_text("9999")
    found = memory_left(proc(tmp_path, 1024, "0::/job"), tmp_path / "cgroup")
    assert found is not None
    assert found.bytes == 0


def test_without_a_limit_what_is_left_is_the_node_s(tmp_path: Path) -> None:
    assert memory_left(proc(tmp_path, 2, "0::/job"), tmp_path / "nothing") == MemoryLeft(
        2048, "the node's memory", 99 << 10
    )


class Rank:
    """The slots of one rank, and which of them were reported as free."""

    def __init__(self) -> None:
        self.freed: list[int] = []
        self.slots = SlotPool("g", self.freed.append)

    def assign(self, size: int = 4096) -> list[int]:
        new_memories = [self.slots.allocate(0, size) for _ in range(2 - self.slots.count_of_size(0, size))]
        return [slot.memory.fd for slot in self.slots.assign(0, size, new_memories)]


def test_full_slots_come_first_when_slots_are_assigned_again() -> None:
    rank = Rank()
    first = rank.assign()
    full = rank.slots.mark_full(0, 1)
    assert full is not None
    again = rank.assign()
    assert again == first[::-1]
    assert full.fill_count == 0
    assert rank.slots.next_free(0).number == 1
    assert full.number == 0
    rank.slots.close()


def test_a_slot_of_another_size_is_closed_when_it_becomes_free() -> None:
    rank = Rank()
    rank.assign()
    full = rank.slots.mark_full(0, 0)
    assert full is not None
    rank.assign(8192)
    assert full.memory.fd >= 0
    rank.slots.mark_free(full)
    assert full.memory.fd < 0
    assert rank.freed == [], "the rank does not use this slot any more"
    rank.slots.close()


def test_free_slots_of_another_size_make_room_for_new_ones() -> None:
    rank = Rank()
    rank.assign()
    full, free = rank.slots.mark_full(0, 0), rank.slots.next_free(0)
    assert full is not None
    assert free is not None
    rank.slots.close_free_of_other_sizes(0, 8192)
    assert (full.memory.fd >= 0, free.memory.fd >= 0) == (True, False)
    rank.slots.close()


def test_a_full_slot_is_not_filled_again() -> None:
    rank = Rank()
    rank.assign()
    slot = rank.slots.mark_full(0, 0)
    assert slot is not None
    assert rank.slots.mark_full(0, 0) is None
    assert rank.slots.mark_full(0, 2) is None
    rank.slots.mark_free(slot)
    assert rank.freed == [0]
    assert rank.slots.mark_full(0, 0) is slot
    rank.slots.close()


def shard(freed: list[str], word: str, tier: "Tier.ValueType" = TIER_OWN, step: int = 1) -> Shard:
    memory = SealedMemory(word, 4096, sparse=True)
    pieces = (Piece(0, 4096, word.encode()),)
    return Shard(0, Version(1, step), tier, pieces, bytes(16), memory, lambda: freed.append(word))


def test_the_last_release_frees_a_shard() -> None:
    freed: list[str] = []
    shard_store = ShardStore(lambda: None)
    own = shard(freed, "own")
    shard_store.add(own)
    with own.held():
        shard_store.drop(lambda s: True, "test")
        assert freed == []
    assert freed == ["own"]
    with pytest.raises(RuntimeError, match="has been freed"):
        own.hold()


def test_a_shard_is_kept_while_a_replica_refers_to_it() -> None:
    freed: list[str] = []
    shard_store = ShardStore(lambda: None)
    own, copy = shard(freed, "own"), shard(freed, "copy", TIER_BUDDY)
    copy.references[0] = (own.hold(), 0)
    own.memory.view[:3] = b"abc"
    assert bytes(copy.piece(0)[:3]) == b"abc"
    shard_store.add(own)
    shard_store.add(copy)
    shard_store.drop(lambda s: s.tier == TIER_OWN, "test")
    assert freed == []
    shard_store.drop(lambda s: True, "test")
    assert freed == ["copy", "own"]


def test_quarantine_drops_the_replicas_that_refer_to_a_corrupt_shard() -> None:
    freed: list[str] = []
    changes: list[int] = []
    shard_store = ShardStore(lambda: changes.append(1))
    own, copy, other = shard(freed, "own"), shard(freed, "copy", TIER_BUDDY), shard(freed, "other", TIER_BUDDY, 2)
    copy.references[0] = (own.hold(), 0)
    for one in (own, copy, other):
        shard_store.add(one)
    shard_store.quarantine(own, "test")
    assert shard_store.all() == [other]
    assert sorted(freed) == ["copy", "own"]
    assert len(changes) == 4
