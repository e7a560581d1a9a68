"""kill -9 of an agent at every operation of a flush on storage: what is left is no checkpoint, or a whole one, and the
next flush succeeds and removes it."""

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import xxhash
from tests.unit.test_checkpoint_object_store import local_objects
from tests.unit.test_checkpoint_service import Gang, running_gang, small

from muster.checkpoint.durable.durable_store import DurableStore
from muster.checkpoint.durable.posix_folder import PosixFolder
from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.flush.flusher import Flusher
from muster.checkpoint.store.flush.retention import Retention
from muster.checkpoint.testing.crashing_store import CrashingStore, Killed
from muster.daemon.host.worker_threads import WorkerThreads
from muster.v1.agent_pb2 import TIER_OWN, FlushOrder

PLACES = {0: "n0", 1: "n1"}
TORN = ("write_part", "remove_folder")
"""Operations that can be half done."""
MakeStore = Callable[[Path], DurableStore]


@pytest.fixture
async def gang() -> AsyncIterator[Gang]:
    async with running_gang() as gang:
        await gang.add(*PLACES.values())
        await gang.run(PLACES, size=1 << 20)
        await keep(gang, 1)
        yield gang


async def keep(gang: Gang, step: int) -> None:
    await gang.step(step, small)
    await gang.committed(Version(1, step))


async def flush(gang: Gang, step: int, serial: int, stores: dict[str, DurableStore]) -> dict[str, str]:
    """One flush, each node with its own view of the storage. When an agent is killed, or its flush has failed, the
    coordinator gives the flush up. Returns what became of each node's part; empty: it is written."""
    order = FlushOrder(serial=serial, version=Version(1, step).to_wire(), reason="a test")
    for rank, node in PLACES.items():
        order.sources.add(rank=rank, node=node, tier=TIER_OWN)
    threads = WorkerThreads(8)

    async def write(node: str) -> None:
        service = gang.nodes[node].checkpoint_service
        store = service._shard_store
        rebuild = service._flusher._rebuild
        flusher = Flusher(
            gang.gang_id, node, store, lambda: Version(0, 0), threads, lambda: None, lambda _: None, rebuild
        )
        try:
            await flusher.flush(order, stores[node], Retention(keep=1))
        except Killed as error:
            raise RuntimeError("killed") from error  # a BaseException would end the event loop

    tasks = {node: asyncio.create_task(write(node)) for node in PLACES.values()}
    await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks.values():
        task.cancel()
    await asyncio.wait(tasks.values())
    threads.close()
    return {node: "cancelled" if task.cancelled() else str(task.exception() or "") for node, task in tasks.items()}


def whole_checkpoints(store: DurableStore, world_size: int) -> list[int]:
    """The steps of all folders that are taken for checkpoints. Each must have all bytes of all ranks."""
    steps = []
    for found in store.folders():
        if found.completed_ns is None:
            continue
        manifest = json.loads(store.read(f"{found.name}/{durable_folders.MANIFEST}", 1 << 20))
        assert manifest["world_size"] == len(manifest["ranks"]) == world_size
        for note in manifest["ranks"].values():
            assert (
                xxhash.xxh3_128_hexdigest(store.read(f"{found.name}/{note['file']}", 1 << 24)) == note["file_xxh3_128"]
            )
        steps.append(found.label.version.step)
    return sorted(steps)


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("make_store", [PosixFolder, local_objects], ids=["folder", "objects"])
@pytest.mark.parametrize("victim", list(PLACES.values()))
async def test_a_flush_whose_agent_is_killed_leaves_no_half_checkpoint(
    gang: Gang, tmp_path: Path, make_store: MakeStore, victim: str
) -> None:
    before = tmp_path / "before"
    before.mkdir()
    assert await flush(gang, 1, 1, dict.fromkeys(PLACES.values(), make_store(before))) == {"n0": "", "n1": ""}
    await keep(gang, 2)
    labels: list[str] = []
    killed_after_completion = 0
    for operations in itertools.count():
        for torn in (False, True):
            if torn and labels[-1] not in TORN:
                continue
            folder = tmp_path / f"{operations}-{torn}"
            shutil.copytree(before, folder, copy_function=shutil.copy2)
            store = make_store(folder)
            dying = CrashingStore(store, operations, torn=torn)
            outcome = await flush(gang, 2, 2, {**dict.fromkeys(PLACES.values(), store), victim: dying})
            labels = dying.labels
            steps = whole_checkpoints(store, len(PLACES))
            assert steps in ([1], [2], [1, 2]), "the older one stays until a newer one is complete"
            killed_after_completion += dying.is_dead and 2 in steps
            again = await flush(gang, 2, 3, dict.fromkeys(PLACES.values(), store))
            assert set(again.values()) == {""}, f"after {labels}: {again}"
            assert whole_checkpoints(store, len(PLACES)) == [2], f"after {labels}"
            left = {name for name in files(folder) if durable_folders.parse_folder_name(name) is None}
            assert not left, f"after {labels}"
            shutil.rmtree(folder)
        if not dying.is_dead:
            assert set(outcome.values()) == {""}
            break
    expected = {"prepare", "make_folder", "create", "write_part", "finish", "write"}
    if victim == "n0":
        expected |= {"complete", "remove", "remove_folder", "retire"}
        assert killed_after_completion
    assert set(labels) >= expected
    with suppress(FileNotFoundError):
        shutil.rmtree(before)
