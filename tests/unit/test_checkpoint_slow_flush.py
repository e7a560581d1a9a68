"""A flush to slow storage: training keeps committing newer steps, and a planned stop flushes the newest one."""

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.test_checkpoint_rank_file import CONTENTS, Content, shard_of
from tests.unit.test_checkpoint_service import Gang, flush_all, flush_order, running_gang, sharded, until

from muster.checkpoint.durable.posix_folder import PosixFile, PosixFolder
from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.errors import CorruptShard, FlushError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.flush import flush_version, flusher, held_shards
from muster.checkpoint.store.flush.give_up import FlushCancellation
from muster.checkpoint.store.flush.rank_file import write_rank_file
from muster.checkpoint.store.flush.rank_source import RankSource, move_all
from muster.checkpoint.store.flush.written_bytes import WrittenBytes
from muster.checkpoint.store.memory import memory_need
from muster.checkpoint.store.memory.sealed_memory import NoMemoryLeft
from muster.daemon.host.process.cgroup_memory import MemoryLeft

PLACES = {0: "n0", 1: "n1"}
FOLDER = "step_00000001_g1_g1"


class SlowStore(PosixFolder):
    """It takes one part of each file. `files`: by their names, each takes one part more with each release; once
    `goes_on` is set, storage is as fast as any."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.goes_on = False
        self.files: dict[str, threading.Semaphore] = {}

    def create(self, name: str) -> PosixFile:
        return _SlowFile(self, name)

    def go_on(self) -> None:
        self.goes_on = True
        for file in self.files.values():
            file.release()


class _SlowFile(PosixFile):
    def __init__(self, store: SlowStore, name: str) -> None:
        super().__init__(os.open(store.path / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))
        self._store, self._parts = store, threading.Semaphore(0)
        store.files[name] = self._parts

    def write(self, data: memoryview) -> None:
        super().write(data)
        if not self._store.goes_on:
            self._parts.acquire()


def _nothing(*_: object) -> None:
    pass


@settings(max_examples=30, deadline=None, database=None)
@given(content=CONTENTS, data=st.data())
def test_a_source_may_move_at_any_part_and_its_slot_be_written_again(
    content: Content, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    with shard_of(content) as (shard, _):
        plain = write_rank_file(PosixFolder(folder), "plain", RankSource(shard), _nothing, WrittenBytes())
        source, calls = RankSource(shard), iter(range(1000))
        moves_at = data.draw(st.integers(-1, 12))

        def move_now() -> None:
            move_all([source], _nothing)
            shard.memory.view[:] = bytes(shard.bytes)

        if moves_at < 0:
            move_now()  # before the file is begun
        moved = write_rank_file(
            PosixFolder(folder),
            "moved",
            source,
            lambda: move_now() if next(calls) == moves_at else None,
            WrittenBytes(),
        )
        assert moved == plain
        assert source.bytes_to_move() == len(source._view) == 0, "the copy is freed"
    assert (folder / "moved").read_bytes() == (folder / "plain").read_bytes()


def test_only_what_is_still_to_be_written_is_copied_and_all_of_it_is_verified() -> None:
    content = Content([bytes(4000)], [], shared=False, piece_bytes=400)
    with shard_of(content) as (shard, _):
        source, sizes = RankSource(shard), []
        shard.memory.view[399] ^= 1
        with pytest.raises(CorruptShard, match="rank 3's shard of step 5 of generation 2 has changed in memory"):
            move_all([source], sizes.append)
        shard.memory.view[399] ^= 1
        source._next = 5
        move_all([source], sizes.append)
        assert sizes[1] == sizes[0] - 5 * 400
        assert source.bytes_to_move() == 0


def test_a_flush_leaves_memory_to_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    left = MemoryLeft(300 << 20, "of the node")
    monkeypatch.setattr(memory_need, "left_to_this_process", lambda: left)
    copies = memory_need.CopiesOfOthers()
    memory_need.check_room_for_flush(150 << 20, copies)
    with pytest.raises(NoMemoryLeft, match=r"to copy the 151 MiB that are still to be written.*300 MiB are left"):
        memory_need.check_room_for_flush(151 << 20, copies)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SlowStore]:
    store = SlowStore(tmp_path)
    yield store
    store.go_on()  # else a failed test leaves threads that never end


async def slow_flush(gang: Gang, store: SlowStore) -> "asyncio.Future[list[object]]":
    """A flush of step 1 of which each rank's file has been begun, and can't go on."""
    await gang.add(*PLACES.values())
    await gang.run(PLACES)
    await keep(gang, 1)
    order = flush_order(gang, Version(1, 1))
    work = [node.checkpoint_service._flusher.flush(order, store) for node in gang.nodes.values()]
    running: asyncio.Future[list[object]] = asyncio.gather(*work, return_exceptions=True)
    files = [store.path / f".{FOLDER}.1.tmp" / durable_folders.rank_file_name(rank) for rank in PLACES]
    await until(lambda: all(file.exists() and file.stat().st_size for file in files))
    return running


async def keep(gang: Gang, step: int) -> None:
    await gang.step(step, sharded(step))
    await gang.committed(Version(1, step))


def check_files(folder: Path, step: int) -> None:
    manifest = json.loads((folder / durable_folders.MANIFEST).read_bytes())
    assert manifest["step"] == step
    assert (folder / durable_folders.rank_file_name(0)).read_bytes().startswith(sharded(step)(0))
    assert (folder / durable_folders.METADATA).exists()


@pytest.mark.parametrize("newer", [False, True])
async def test_training_commits_newer_steps_while_storage_is_slow(
    store: SlowStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newer: bool
) -> None:
    monkeypatch.setattr(flusher, "PROGRESS_S", 0.01)
    async with running_gang() as gang:
        running = await slow_flush(gang, store)
        await keep(gang, 2)
        held = [node.checkpoint_service._flusher._held for node in gang.nodes.values()]
        assert all("holds_slots: true" in str(n.checkpoint_service.flush_progress()) for n in gang.nodes.values())
        await until(lambda: all(one is not None and one.sources[0].owns_bytes for one in held))
        for file in store.files.values():
            file.release()  # what storage is taking is read from the slot
        for step in range(3, 7):  # with a slot held by the flush, step 3 would have none
            await keep(gang, step)
        assert not running.done()
        progress = gang.nodes["n0"].checkpoint_service.flush_progress()
        assert progress is not None
        assert (progress.version, progress.holds_slots) == (Version(1, 1).to_wire(), False)
        assert 0 < progress.written < progress.total
        if newer:  # as at a planned stop: the newest step is written, not the one that is being written
            newest = asyncio.create_task(flush_all(gang, flush_order(gang, Version(1, 6)), tmp_path))
            await until(lambda: all(n.checkpoint_service._flusher._newest_serial == 2 for n in gang.nodes.values()))
        store.go_on()
        outcomes = await running
        if newer:
            assert str(outcomes[0]) == "flush 1 is given up: a newer flush was ordered"
            await newest
        else:
            assert outcomes == [Version(1, 1), None]
    step = 6 if newer else 1
    assert [path.name for path in tmp_path.iterdir()] == [f"step_0000000{step}_g1_g1"]
    check_files(tmp_path / f"step_0000000{step}_g1_g1", step)


@pytest.mark.parametrize("left", [1 << 40, 0], ids=["storage hangs", "no memory"])
async def test_a_planned_stop_keeps_its_last_step_and_a_newer_flush_writes_it(
    store: SlowStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """The slots of the flush can't be free in time otherwise, so it is given up."""
    monkeypatch.setattr(held_shards, "STOP_WAIT_S", 0.05)
    async with running_gang() as gang:
        running = await slow_flush(gang, store)
        monkeypatch.setattr(memory_need, "left_to_this_process", lambda: MemoryLeft(left, "of the node"))
        await keep(gang, 2)
        for node in gang.nodes.values():
            node.checkpoint_service.stop_ranks("the time limit is near")
        await keep(gang, 3)
        store.go_on()
        outcomes = await running
        assert "flush 1 is given up: the ranks need the memory that it holds for their last step" in str(outcomes[0])
        assert list(tmp_path.iterdir()) == []
        await flush_all(gang, flush_order(gang, Version(1, 3)), tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["step_00000003_g1_g1"]
    check_files(tmp_path / "step_00000003_g1_g1", 3)


async def test_a_stop_without_ranks_gives_no_flush_up(store: SlowStore, tmp_path: Path) -> None:
    """An agent may hear of the stop only when the last step is being written."""
    async with running_gang() as gang:
        running = await slow_flush(gang, store)
        services = [node.checkpoint_service for node in gang.nodes.values()]
        for rank in gang.ranks.values():
            rank.connection.close()
        await until(lambda: all(services[rank]._sockets.generation(rank) is None for rank in PLACES))
        for service in services:
            service.stop_ranks("the time limit is near")
        await asyncio.sleep(0)
        assert [service._flusher._stop_during for service in services] == [0, 0]
        store.go_on()
        assert await running == [Version(1, 1), None]
    check_files(tmp_path / FOLDER, 1)


async def test_a_planned_stop_waits_for_no_storage_in_which_nodes_agree_on_the_version(
    store: SlowStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def choose(exchange: flush_version.VersionExchange, held: Version) -> Version:
        assert answers.wait(60)
        return held

    monkeypatch.setattr(flush_version, "choose_version", choose)
    async with running_gang() as gang:
        await gang.add(*PLACES.values())
        await gang.run(PLACES)
        await keep(gang, 1)
        flushers = [node.checkpoint_service._flusher for node in gang.nodes.values()]
        order = flush_order(gang, Version(1, 1))
        running = asyncio.gather(*(one.flush(order, store) for one in flushers), return_exceptions=True)
        await until(lambda: all(one._choosing is not None for one in flushers))
        await keep(gang, 2)
        for node in gang.nodes.values():
            node.checkpoint_service.stop_ranks("the time limit is near")
        await keep(gang, 3)
        answers.set()
        outcomes = [str(outcome) for outcome in await running]
        assert all("flush 1 is given up: the ranks need the memory" in words for words in outcomes), outcomes
        assert list(tmp_path.iterdir()) == []


class AbandonedStore(PosixFolder):
    """The flush leader removes the folder of the declarations at this call."""

    abandoned_at = "write"

    def write(self, name: str, data: bytes) -> None:
        if self.abandoned_at == "write":
            self.remove_folder(name.partition("/")[0])
        super().write(name, data)

    def names(self, folder: str = "") -> list[str]:
        if self.abandoned_at == "names":
            self.remove_folder(folder)
        return super().names(folder)


@pytest.mark.parametrize("abandoned_at", ["write", "names"])
def test_a_node_that_declares_when_the_leader_has_ended_the_flush_says_so(tmp_path: Path, abandoned_at: str) -> None:
    store = AbandonedStore(tmp_path)
    store.abandoned_at = abandoned_at
    exchange = flush_version.VersionExchange(store, ".flush-g1-1", "n1", frozenset({"n0", "n1"}), FlushCancellation())
    with pytest.raises(FlushError, match="given up: the node that leads the flush has ended it"):
        flush_version.choose_version(exchange, Version(1, 1))
