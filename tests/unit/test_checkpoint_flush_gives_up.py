"""A flush into a file system that hangs: it is given up, and the ranks get their slots back while the thread hangs."""

import asyncio
import os
from pathlib import Path

import pytest
from tests.unit.test_checkpoint_service import flush_all, flush_order, replica, running_gang, until

from muster.checkpoint.durable.newest import newest_checkpoint
from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.versions import Version

PLACES = {0: "n0", 1: "n1"}
NEWER_STEPS = range(3, 7)


async def test_a_flush_that_hangs_holds_no_slot_once_it_is_given_up(tmp_path: Path) -> None:
    durable, other_name = tmp_path / "durable", tmp_path / "pipe"
    async with running_gang() as gang:
        await gang.add(*PLACES.values())
        await gang.run(PLACES)
        await gang.step(1, replica(1))
        await gang.committed(Version(1, 1))
        order = flush_order(gang, Version(1, 1))
        aside = durable / durable_folders.temporary_folder_name(Version(1, 1), gang.gang_id, order.serial)
        aside.mkdir(0o755, parents=True)
        pipe = aside / durable_folders.rank_file_name(0)
        os.mkfifo(pipe)  # its opener hangs until somebody reads
        os.link(pipe, other_name)  # the leader removes the first name
        hanging = asyncio.create_task(gang.nodes["n0"].checkpoint_service.flush(order, str(durable)))
        other = asyncio.create_task(gang.nodes["n1"].checkpoint_service.flush(order, str(durable)))
        await other
        await gang.step(2, replica(2))
        await gang.committed(Version(1, 2))
        hanging.cancel()
        for step in NEWER_STEPS:  # with a slot held by the flush, step 3 would have none
            await gang.step(step, replica(step))
            await gang.committed(Version(1, step))
        reader = os.open(other_name, os.O_RDONLY | os.O_NONBLOCK)
        with pytest.raises(asyncio.CancelledError):
            await hanging
        os.close(reader)
        assert newest_checkpoint(str(durable)) is None
        await until(lambda: not any(durable.iterdir()))
        # Storage answers again: the next flush is complete.
        await flush_all(gang, flush_order(gang, Version(1, NEWER_STEPS[-1])), durable)
        assert newest_checkpoint(str(durable)) is not None
