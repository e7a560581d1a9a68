"""A training process is killed at every labelled point of its snapshot: the newest committed step is restored, bit by
bit."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from muster.checkpoint.testing.gang_in_one_process import InProcessGang
from muster.checkpoint.testing.rank_processes import run_to_end

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parent / "kill_points_script.py"
NODES = ("n0", "n1")
PLACES = dict(enumerate(NODES))
KILLED_AT = 3
POINTS = ["before the copy", "amid a tensor", "amid the objects", "before the report", "after the report"]


async def run(gang: InProcessGang, out: Path, **job: Any) -> tuple[int, str]:
    """Train until the script ends: its exit code, and what its ranks have printed."""
    sockets = {rank: gang.socket(rank, node) for rank, node in PLACES.items()}
    return await run_to_end(SCRIPT, out, len(PLACES), job, sockets, gang.generation)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - a service tells nobody
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("point", POINTS)
async def test_the_newest_committed_step_is_restored(gang: InProcessGang, tmp_path: Path, point: str) -> None:
    gang.begin(PLACES)
    killed, text = await run(gang, tmp_path, steps=100, point=point, rank=1, step=KILLED_AT)
    assert killed == 1, text[-3000:]
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
    again, text = await run(gang, tmp_path, steps=newest.step + 2, point="", rank=-1, step=0)
    assert again == 0, text[-3000:]
    for rank in PLACES:
        expected = (tmp_path / f"{rank}.{newest.step}").read_text()
        assert (tmp_path / f"{rank}.restored").read_text() == f"{newest.step} {expected}"
    await until(lambda: all(node.committed().step == newest.step + 2 for node in gang.nodes.values()))
