"""What a node needs for slots and copies is looked at when slots are asked for."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from tests.unit.test_checkpoint_service import SHARED, Gang, running_gang, small, until

from muster.checkpoint.durable.object_store import UPLOAD_BYTES
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.checkpoint_service import CheckpointService
from muster.checkpoint.store.flush.flush_part import WRITERS
from muster.checkpoint.store.memory import memory_need
from muster.checkpoint.store.memory.memory_need import CopiesOfOthers, check_memory
from muster.checkpoint.store.memory.sealed_memory import NoMemoryLeft, SealedMemory, sparse_bytes
from muster.checkpoint.training.durable_loading.load_progress import Loaded
from muster.daemon.host.process.cgroup_memory import MemoryLeft
from muster.launcher.plan import node_memory

MIB = 1 << 20


def leave(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    """The node has so much memory left, whatever this machine has."""
    left = MemoryLeft(mib * MIB, "the memory limit of the cgroup /job")
    monkeypatch.setattr(memory_need, "left_to_this_process", lambda: left)


def test_copies_need_two_versions_of_what_no_local_rank_holds() -> None:
    copies = CopiesOfOthers(copied_ranks=2, local_ranks=2)
    assert copies.bytes == 0
    copies.note(0, 100, 0)
    copies.note(1, 100, 90)
    assert copies.bytes == 2 * (100 + 10)
    copies.note(1, 200, 90)
    assert copies.bytes == 2 * (100 + 110), "a rank that plans again needs what it has asked for last"
    assert CopiesOfOthers(0, 2, {0: 100}).bytes == 0, "this node is nobody's buddy"
    assert CopiesOfOthers(3, 2, {0: 100, 1: 100}).bytes == 2 * 2 * 200, "a smaller node copies a larger one"


def test_parts_of_parities_need_two_versions_of_whole_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, each with a part of a parity of four ranks."""
    copies = CopiesOfOthers(0, 2, share_of_parts=2 / 3, words="parts of parities")
    copies.note(0, 30 * MIB, 29 * MIB)
    copies.note(1, 21 * MIB, 0)
    assert copies.bytes == 2 * 20 * MIB
    leave(monkeypatch, 60)
    with pytest.raises(NoMemoryLeft, match=r"60 MiB for 2 slots, parts of parities need \d+ MiB, and 60 MiB are left"):
        check_memory(0, 2, 30 * MIB, copies)


def test_memory_for_slots_alone_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = CopiesOfOthers(1, 1)
    copies.note(0, 10 * MIB, 0)
    used = sparse_bytes()
    leave(monkeypatch, 40)
    check_memory(0, 2, 10 * MIB, copies)
    leave(monkeypatch, 39 - used // MIB)
    with pytest.raises(NoMemoryLeft) as refused:
        check_memory(0, 2, 10 * MIB, copies)
    assert "rank 0 needs 20 MiB for 2 slots, copies of other nodes' states need" in str(refused.value)
    assert "the memory limit of the cgroup /job" in str(refused.value)


def test_uploads_need_memory_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 30)
    check_memory(0, 2, 10 * MIB, CopiesOfOthers(), 10 * MIB)
    with pytest.raises(NoMemoryLeft, match="uploads of durable checkpoints need 11 MiB, and 30 MiB are left"):
        check_memory(0, 2, 10 * MIB, CopiesOfOthers(), 11 * MIB)


def test_the_plan_counts_what_agents_count_for_uploads() -> None:
    assert node_memory.UPLOADS == WRITERS * UPLOAD_BYTES


def test_copies_that_are_there_already_need_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = CopiesOfOthers(1, 1)
    copies.note(0, 10 * MIB, 0)
    held = SealedMemory("muster-g-r1-b1", 16 * MIB, sparse=True)
    held.view[: 15 * MIB] = bytes(15 * MIB)
    assert sparse_bytes() >= 15 * MIB
    leave(monkeypatch, 25)
    check_memory(0, 2, 10 * MIB, copies)
    held.close()


@asynccontextmanager
async def two_nodes_short_of_memory(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gang]:
    """A node has a rank each, and memory for three slots: two slots and copies of the other rank's state need more."""
    async with running_gang() as gang:
        await gang.add("a", "b")
        await gang.run({0: "a", 1: "b"}, size=0)
        leave(monkeypatch, 3 * (SHARED // MIB))
        yield gang


async def test_a_rank_gets_no_slots_where_copies_would_find_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_nodes_short_of_memory(monkeypatch) as gang:
        words = await asyncio.to_thread(gang.ranks[0].layout, SHARED)
        assert "copies of other nodes' states need" in words
        assert gang.nodes["a"].checkpoint_service.no_slots == words
        leave(monkeypatch, 1 << 20)
        await gang.run({0: "a", 1: "b"})
        assert gang.nodes["a"].checkpoint_service.no_slots == ""


def _reads(service: CheckpointService, size: int) -> bool:
    """The ranks of this node read so many bytes of a durable checkpoint."""
    found = service.restore_progress()
    return found is not None and found.bytes == size


async def test_a_rank_that_loads_a_checkpoint_is_told_before_its_first_step_that_its_slots_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_nodes_short_of_memory(monkeypatch) as gang:
        told = gang.nodes["a"].checkpoint_service
        for size in (SHARED, 2 * SHARED):  # how much it reads shows as it reads
            assert told.no_slots == ""
            gang.ranks[0].connection.report_load(Loaded("/ckpt/1", Version(1, 7), size))
            await until(partial(_reads, told, size))
        assert re.match("rank 0 needs 36 MiB for slots, and 27 MiB are left", told.no_slots)
        assert caplog.text.count("rank 0 will get no slots") == 1
        leave(monkeypatch, 1 << 20)
        assert not await asyncio.to_thread(gang.ranks[0].layout, SHARED)
        assert told.no_slots == "", "there is more memory now"


async def test_slots_of_all_ranks_of_a_node_and_its_parts_of_parities_are_expected_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_gang() as gang:
        gang.parity_groups = [["a", "b", "c"]]
        await gang.add("a", "b", "c")
        await gang.run({0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}, size=0)
        leave(monkeypatch, 5 * (SHARED // MIB))
        told = gang.nodes["a"].checkpoint_service
        for rank in (0, 1):
            assert told.no_slots == ""
            gang.ranks[rank].connection.report_load(Loaded("/ckpt/1", Version(1, 7), SHARED))
            await until(partial(_reads, told, (rank + 1) * SHARED))
        assert re.match(r"2 ranks of this node need 36 MiB for slots, parts of .* need \d+ MiB, and 45", told.no_slots)


async def test_slots_that_ranks_have_are_expected_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_gang() as gang:
        await gang.add("a", "b")
        for size in (SHARED, 0):
            await gang.run({0: "a", 1: "b"}, size=size)
        leave(monkeypatch, 0)
        told = gang.nodes["a"].checkpoint_service
        gang.ranks[0].connection.report_load(Loaded("/ckpt/1", Version(1, 7), SHARED))
        await until(partial(_reads, told, SHARED))
        assert told.no_slots == ""


async def test_a_rank_that_gets_its_slots_later_keeps_steps_with_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_nodes_short_of_memory(monkeypatch) as gang:
        for _ in range(2):
            assert await asyncio.to_thread(gang.ranks[0].layout, SHARED)
        assert caplog.text.count("rank 0 gets no slots") == 1, "it asks again and again"
        leave(monkeypatch, 1 << 20)
        assert not await asyncio.to_thread(gang.ranks[1].layout, SHARED)
        for step in (1, 2, 3):
            await gang.step_without_wait(step, small, skip=(0,))
        assert not await asyncio.to_thread(gang.ranks[0].layout, SHARED)
        assert gang.nodes["a"].checkpoint_service.no_slots == ""
        for step in itertools.count(4):
            await gang.step_without_wait(step, small)
            if any(node.committed().step > 3 for node in gang.nodes.values()):
                break
            assert step < 10_000, "no step is committed"
