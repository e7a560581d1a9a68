"""Four gloo ranks with the library's lines, of which one keeps the GIL for ever: what their agents report."""

import asyncio
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from muster.checkpoint.testing.gang_in_one_process import InProcessGang, reported
from muster.checkpoint.testing.rank_processes import RankScript, rank_pids, start_ranks
from muster.daemon.agent.ranks.hang_place import place_in
from muster.daemon.agent.ranks.stack_dumps import write_stacks
from muster.daemon.host.held_folder import HeldFolder

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parent / "hang_script.py"
PLACES = {rank: f"n{rank // 2}" for rank in range(4)}
HANGING_RANK, HANG_AFTER = 2, 20
NAMED_AFTER_S = 8
"""The silence at which the core names a rank (`hang_detector.SILENT_RANK_S`)."""


async def start(gang: InProcessGang, folder: Path, hang: str) -> RankScript:
    sockets = {rank: gang.socket(rank, node) for rank, node in PLACES.items()}
    job = {"hanging_rank": HANGING_RANK, "hang_after": HANG_AFTER, "hang": hang}
    return await start_ranks(SCRIPT, len(PLACES), sockets, folder / "log", job, TORCH_FR_BUFFER_SIZE="100")


def steps_and_silences(gang: InProcessGang) -> tuple[dict[int, int], dict[int, int]]:
    """Of all ranks: the newest step, and the seconds of silence."""
    services = {rank: gang.nodes[node].checkpoint_service for rank, node in PLACES.items()}
    steps = {rank: step for service in services.values() for rank, step in service.progress().items()}
    return steps, {rank: reported(service, rank).silent_s for rank, service in services.items()}


async def test_the_rank_that_keeps_the_gil_is_the_silent_one_and_the_only_one_that_does_not_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gang = InProcessGang("g")
    await gang.add(*dict.fromkeys(PLACES.values()))
    gang.begin(PLACES)
    process = await start(gang, tmp_path, "keep_gil_for_ever")
    try:
        async with asyncio.timeout(150):
            while steps_and_silences(gang)[0].get(HANGING_RANK, 0) < HANG_AFTER:
                assert process.returncode is None, (tmp_path / "log").read_text()[-3000:]
                await asyncio.sleep(0.01)
            held_at = time.monotonic()
            while steps_and_silences(gang)[1].get(HANGING_RANK, 0) < NAMED_AFTER_S:  # noqa: ASYNC110 - a service tells nobody
                await asyncio.sleep(0.01)
        with capsys.disabled():
            print(f"\nreported as silent for {NAMED_AFTER_S} s, {time.monotonic() - held_at:.1f} s after it began")
        assert steps_and_silences(gang)[1] == {rank: NAMED_AFTER_S if rank == HANGING_RANK else 0 for rank in PLACES}
        files = {f"rank{rank}.stacks": pid for rank, pid in rank_pids(process).items()}
        with HeldFolder.open(tmp_path) as folder:
            texts = await asyncio.to_thread(write_stacks, folder, files)
        places = {name.removesuffix(".stacks"): place_in(text) for name, text in texts.items()}
        waits = {name: place is not None and place.waits for name, place in places.items()}
        assert waits == {f"rank{rank}": rank != HANGING_RANK for rank in PLACES}, places
        hanging = places[f"rank{HANGING_RANK}"]
        assert hanging is not None
        assert hanging.where.startswith("keep_gil_for_ever (hang_script.py:")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await gang.close()


@pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), reason="this torch has no flight recorder for gloo"
)
async def test_the_rank_that_reads_for_ever_has_entered_fewer_collectives_than_all_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gang = InProcessGang("g")
    await gang.add(*dict.fromkeys(PLACES.values()))
    gang.begin(PLACES)
    process = await start(gang, tmp_path, "read_for_ever")
    try:
        async with asyncio.timeout(150):
            while len(found := entered(gang)) < len(PLACES):
                assert process.returncode is None, (tmp_path / "log").read_text()[-3000:]
                await asyncio.sleep(0.01)
        with capsys.disabled():
            print(f"\ncollectives entered by each rank: {dict(sorted(found.items()))}")
        others = {number for rank, number in found.items() if rank != HANGING_RANK}
        assert len(others) == 1
        assert found[HANGING_RANK] < min(others)
        assert steps_and_silences(gang)[0][HANGING_RANK] == HANG_AFTER
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await gang.close()


def entered(gang: InProcessGang) -> dict[int, int]:
    """The collectives that each rank has entered, of all ranks that say so."""
    services = {rank: gang.nodes[node].checkpoint_service for rank, node in PLACES.items()}
    found = {rank: service.rank_reports.entered_collectives(rank) for rank, service in services.items()}
    return {rank: number for rank, number in found.items() if number is not None}
