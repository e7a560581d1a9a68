"""A flush into a file system that hangs: it is given up, and the ranks get their slots back while the thread hangs."""

import asyncio
import threading
from pathlib import Path

import pytest
from tests.unit.test_checkpoint_service import flush_all, flush_order, replica, running_gang, until

from muster.checkpoint.durable.newest import newest_checkpoint
from muster.checkpoint.durable.posix_folder import PosixFile, PosixFolder
from muster.checkpoint.format.versions import Version

PLACES = {0: "n0", 1: "n1"}
NEWER_STEPS = range(3, 7)


class HangingStore(PosixFolder):
    """No file can be opened for writing before `answers` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.answers = threading.Event()

    def create(self, name: str) -> PosixFile:
        assert self.answers.wait(60)
        return super().create(name)


async def test_a_flush_that_hangs_holds_no_slot_once_it_is_given_up(tmp_path: Path) -> None:
    durable = tmp_path / "durable"
    async with running_gang() as gang:
        await gang.add(*PLACES.values())
        await gang.run(PLACES)
        await gang.step(1, replica(1))
        await gang.committed(Version(1, 1))
        order = flush_order(gang, Version(1, 1))
        store = HangingStore(durable)
        hanging = asyncio.create_task(gang.nodes["n0"].checkpoint_service._flusher.flush(order, store))
        other = asyncio.create_task(gang.nodes["n1"].checkpoint_service.flush(order, str(durable)))
        await other
        await gang.step(2, replica(2))
        await gang.committed(Version(1, 2))
        hanging.cancel()
        for step in NEWER_STEPS:  # with a slot held by the flush, step 3 would have none
            await gang.step(step, replica(step))
            await gang.committed(Version(1, step))
        store.answers.set()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert newest_checkpoint(str(durable)) is None
        await until(lambda: not any(durable.iterdir()))
        # Storage answers again: the next flush is complete.
        await flush_all(gang, flush_order(gang, Version(1, NEWER_STEPS[-1])), durable)
        assert newest_checkpoint(str(durable)) is not None
