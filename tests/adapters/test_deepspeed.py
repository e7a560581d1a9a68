"""Training with DeepSpeed's engine, interrupted: it ends with the bits of an unbroken run.

`make deepspeed-test` installs it and runs this.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make deepspeed-test")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make deepspeed-test")

from muster.checkpoint.testing.gang_in_one_process import InProcessGang  # noqa: E402
from muster.checkpoint.testing.rank_processes import start_ranks  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.filterwarnings("default")]

SCRIPT = Path(__file__).parent / "deepspeed_script.py"
PLACES = {0: "n0", 1: "n1"}
STEPS, KEPT_STEPS = 8, 4


async def train(out: Path, gang: InProcessGang | None, **job: Any) -> list[str]:
    """What each rank has written at the end of a run."""
    sockets = {rank: gang.socket(rank, node) for rank, node in PLACES.items()} if gang else {}
    generation = gang.generation if gang else 0
    process = await start_ranks(
        SCRIPT, len(PLACES), sockets, out / "log", {"out": str(out), **job}, generation, DS_ACCELERATOR="cpu"
    )
    async with asyncio.timeout(300):
        assert await process.wait() == 0, (out / "log").read_text()[-3000:]
    return [(out / str(rank)).read_text() for rank in PLACES]


@pytest.mark.parametrize(("stage", "bits"), [(0, 32), (1, 32), (2, 16)])
async def test_a_broken_run_ends_with_the_bits_of_an_unbroken_one(tmp_path: Path, stage: int, bits: int) -> None:
    job = {"stage": stage, "bits": bits}
    straight = await train(tmp_path, None, steps=STEPS, seed=1, **job)
    assert len(set(straight)) == (1 if stage == 0 else 2), "the parts of ZeRO's optimizer differ"

    gang = InProcessGang("g")
    try:
        await gang.add(*PLACES.values())
        gang.begin(PLACES)
        await train(tmp_path, gang, steps=KEPT_STEPS, seed=1, **job)
        async with asyncio.timeout(60):
            while any(node.committed().step < KEPT_STEPS for node in gang.nodes.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        newest = gang.newest(len(PLACES))
        assert newest is not None
        await gang.lose("n1")
        await gang.add("n1")
        gang.begin(PLACES, gang.plan(newest))
        assert await train(tmp_path, gang, steps=STEPS, seed=99, **job) == straight
    finally:
        await gang.close()


@pytest.mark.parametrize(("stage", "bits"), [(0, 16), (3, 32)])
async def test_an_optimizer_that_is_not_known_is_refused(tmp_path: Path, stage: int, bits: int) -> None:
    with pytest.raises(AssertionError, match=r"ZeRO stages 0 \(without 16 bits\), 1 and 2 can be kept"):
        await train(tmp_path, None, steps=1, seed=1, stage=stage, bits=bits)
