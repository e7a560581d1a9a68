"""Two ranks that train with the real libraries are killed in the middle of an epoch: they end with the bits of an
unbroken run.

`make adapters-test` installs the libraries and runs this.
"""

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make adapters-test")

from muster.checkpoint.testing.gang_in_one_process import InProcessGang  # noqa: E402
from muster.checkpoint.testing.rank_processes import start_ranks  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.long]

SCRIPT = Path(__file__).parent / "ranks_script.py"
PLACES = {0: "n0", 1: "n1"}
STEPS, HALT_AFTER = 9, 4
LIBRARIES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            importlib.util.find_spec(name.split("_")[0]) is None, reason="it is not installed: make adapters-test"
        ),
    )
    for name in ("lightning_ddp", "lightning_fsdp2", "transformers_ddp", "accelerate_ddp")
]


@pytest.fixture
async def gang() -> AsyncIterator[InProcessGang]:
    gang = InProcessGang("g")
    await gang.add(*PLACES.values())
    yield gang
    await gang.close()


async def run(
    out: Path, library: str, seed: int, gang: InProcessGang | None = None, halt_after: int = 0
) -> list[dict[str, Any]]:
    """What each rank has written. With `halt_after`: the ranks are killed once this step is committed; nothing."""
    out.mkdir()
    sockets = {rank: gang.socket(rank, node) for rank, node in PLACES.items()} if gang else {}
    job = {"library": library, "out": str(out), "seed": seed, "halt_after": halt_after}
    process = await start_ranks(SCRIPT, len(PLACES), sockets, out / "log", job, gang.generation if gang else 0)
    try:
        async with asyncio.timeout(180):
            while gang and halt_after and any(n.committed().step < halt_after for n in gang.nodes.values()):
                assert process.returncode is None, (out / "log").read_text()[-3000:]
                await asyncio.sleep(0.01)
            if halt_after:
                return []
            assert await process.wait() == 0, (out / "log").read_text()[-3000:]
    finally:
        if process.returncode is None:
            process.kill()  # its ranks die with it
            await process.wait()
    return [torch.load(out / f"{rank}.pt") for rank in PLACES]


@pytest.mark.parametrize("library", LIBRARIES)
async def test_ranks_that_are_killed_go_on_with_the_bits_of_an_unbroken_run(
    gang: InProcessGang, tmp_path: Path, library: str
) -> None:
    straight = await run(tmp_path / "straight", library, seed=1)
    gang.begin(PLACES)
    await run(tmp_path / "killed", library, 1, gang, HALT_AFTER)
    newest = gang.newest(len(PLACES))
    assert newest is not None
    assert newest.step == HALT_AFTER
    await gang.lose("n1")
    await gang.add("n1")
    gang.begin(PLACES, gang.plan(newest))
    restored = await run(tmp_path / "restored", library, 99, gang)
    for one, other in zip(straight, restored, strict=True):
        assert one["steps"] == [*range(1, STEPS + 1)]
        assert other["steps"] == [*range(HALT_AFTER + 1, STEPS + 1)]
        assert all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])
    are_replicas = [torch.equal(straight[0]["weights"][n], straight[1]["weights"][n]) for n in straight[0]["weights"]]
    assert all(are_replicas) == library.endswith("_ddp")
