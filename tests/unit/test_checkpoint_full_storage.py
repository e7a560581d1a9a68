"""A flush to a real file system that is full: it leaves nothing, and the next one succeeds once there is space."""

import asyncio
import subprocess
from pathlib import Path

import pytest
from tests.unit.test_checkpoint_service import flush_all, flush_order, running_gang

from muster.checkpoint.durable.newest import newest_checkpoint
from muster.checkpoint.format.errors import FlushError
from muster.checkpoint.format.versions import Version

PLACES = {0: "n0", 1: "n1"}
SIZE = 2 << 20


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


async def test_a_full_file_system_is_told_and_holds_nothing_up(small_disk: Path) -> None:
    async with running_gang() as gang:
        await gang.add(*PLACES.values())
        await gang.run(PLACES, size=SIZE)
        for step in (1, 2, 3):
            await gang.step(step, lambda rank, step=step: bytes([rank, step]) * (SIZE // 2))
            await gang.committed(Version(1, step))
            order = flush_order(gang, Version(1, step))
            failed = await asyncio.gather(
                *(node.checkpoint_service.flush(order, str(small_disk)) for node in gang.nodes.values()),
                return_exceptions=True,
            )
            assert any(isinstance(error, FlushError) for error in failed)
            assert any(f"{small_disk} is full (No space left on device)" in str(error) for error in failed)
            assert list(small_disk.iterdir()) == []
        remount(small_disk, "size=64m")
        await flush_all(gang, flush_order(gang, Version(1, 3)), small_disk)
        assert newest_checkpoint(str(small_disk)) == str(small_disk / "step_00000003_g1_g1")
        remount(small_disk, "ro")
        await gang.step(4, lambda rank: bytes([rank, 4]) * (SIZE // 2))
        await gang.committed(Version(1, 4))
        with pytest.raises(FlushError, match="Read-only file system"):
            await flush_all(gang, flush_order(gang, Version(1, 4)), small_disk)
        assert [path.name for path in small_disk.iterdir()] == ["step_00000003_g1_g1"]
        remount(small_disk, "rw")
        await flush_all(gang, flush_order(gang, Version(1, 4)), small_disk)
        assert newest_checkpoint(str(small_disk)) == str(small_disk / "step_00000004_g1_g1")
