"""A training process is killed at every labelled point of its snapshot: the newest committed step is restored, bit by
bit."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from muster.checkpoint.testing.gang_in_one_process import InProcessGang
from muster.checkpoint.testing.rank_processes import RankScript, start_ranks

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parent / "kill_points_script.py"
PLACES = {0: "n0", 1: "n1"}
KILLED_AT = 3
POINTS = ["before the copy", "amid a tensor", "amid the objects", "before the report", "after the report"]


@pytest.fixture
async def gang() -> AsyncIterator[InProcessGang]:
    gang = InProcessGang("g")
    await gang.add(*PLACES.values())
    yield gang
    await gang.close()


async def run(gang: InProcessGang, out: Path, **job: Any) -> RankScript:
    """Train until the script ends."""
    sockets = {rank: gang.socket(rank, node) for rank, node in PLACES.items()}
    process = await start_ranks(SCRIPT, len(PLACES), sockets, out / "log", {"out": str(out), **job}, gang.generation)
    try:
        async with asyncio.timeout(120):
            await process.wait()
    finally:
        process.kill()
    return process


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - a service tells nobody
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("point", POINTS)
async def test_the_newest_committed_step_is_restored(gang: InProcessGang, tmp_path: Path, point: str) -> None:
    gang.begin(PLACES)
    killed = await run(gang, tmp_path, steps=100, point=point, rank=1, step=KILLED_AT)
    assert killed.returncode == 1, (tmp_path / "log").read_text()[-3000:]
    reached = max(int(file.suffix[1:]) for file in tmp_path.glob("1.[0-9]*"))
    assert KILLED_AT <= reached < 100, "the point was never passed"

    services = [node.checkpoint_service for node in gang.nodes.values()]
    for service in services:
        service.fence(gang.generation)
    await until(lambda: not any(s.is_digesting(rank, 1) for s in services for rank in PLACES))
    newest = gang.newest(len(PLACES))
    assert newest is not None
    assert newest >= max(node.committed() for node in gang.nodes.values())
    assert 1 <= newest.step <= reached - (point != "after the report")
    gang.begin(PLACES, gang.plan(newest))
    again = await run(gang, tmp_path, steps=newest.step + 2, point="", rank=-1, step=0)
    assert again.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    for rank in PLACES:
        expected = (tmp_path / f"{rank}.{newest.step}").read_text()
        assert (tmp_path / f"{rank}.restored").read_text() == f"{newest.step} {expected}"
    await until(lambda: all(node.committed().step == newest.step + 2 for node in gang.nodes.values()))
