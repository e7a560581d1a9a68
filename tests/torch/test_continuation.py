"""A run that was interrupted goes on with the bits, and with the samples, of one that was not. With real processes."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from muster.checkpoint.testing.rank_processes import start_ranks  # noqa: E402

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parent / "continuation_script.py"
WORLD, SAMPLES = 4, 97

# Before 2.8 fully_shard ran on accelerators alone.
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8)
CASES = ["ddp"] if OLD else ["ddp", "fsdp"]


async def run(out: Path) -> None:
    log = out / "log"
    process = await start_ranks(SCRIPT, WORLD, {}, log, {"out": str(out), "cases": CASES}, generation=0)
    try:
        async with asyncio.timeout(120):
            status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert status == 0, log.read_text()[-3000:]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script has written: all its cases in one start of its ranks."""
    out = tmp_path_factory.mktemp("continuation")
    asyncio.run(run(out))
    return out


def of_ranks(outcome: Path, case: str) -> list[Any]:
    return [json.loads((outcome / f"{case}.{rank}").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("case", CASES)
def test_a_restored_run_with_accumulated_gradients_has_the_bits_of_an_unbroken_one(outcome: Path, case: str) -> None:
    found = of_ranks(outcome, case)
    assert {rank["begun"] for rank in found} == {3}
    assert all(0 < rank["applied"] < 6 for rank in found), "the scaler skips some steps, and not all"
    assert [rank["again"] for rank in found] == [rank["straight"] for rank in found]
    assert len({rank["again"] for rank in found}) == WORLD, "every rank has random generators of its own"


def test_each_sample_is_read_once_through_two_shrinks_and_a_growth(outcome: Path) -> None:
    steps = sorted(step for rank in of_ranks(outcome, "elastic") for step in rank)
    worlds = {step: world for step, world, _ in steps}
    assert list(worlds.values()) == [4] * 4 + [3] * 3 + [2] * 4 + [4] * 5
    assert Counter(step for step, _, _ in steps) == worlds, "every rank takes part in every step"
    read = Counter(sample for _, _, samples in steps for sample in samples)
    total = 2 * sum(worlds.values())
    assert read.total() == total
    whole, rest = divmod(total, SAMPLES)
    assert Counter(read[sample] for sample in range(SAMPLES)) == Counter({whole: SAMPLES - rest, whole + 1: rest})
