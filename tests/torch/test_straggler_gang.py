"""Eight gloo ranks with the library's lines, of which one becomes 30 % slower: from its hooks to the core's verdict."""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from muster.checkpoint.store.block_times import STEPS_PER_BLOCK
from muster.checkpoint.testing.gang_in_one_process import InProcessGang
from muster.daemon.coordinator.core.detection.straggler_detector import follow
from muster.daemon.coordinator.core.state.block_times import GangBlocks
from muster.daemon.coordinator.core.state.events import AgentStatus, BlockTimes, RankState

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parent / "straggler_script.py"
PLACES = {rank: f"n{rank // 4}" for rank in range(8)}
SLOW_RANK, SLOW_FROM, STEPS = 5, 102, 126


class Watch:
    """What the coordinator would see of the gang."""

    def __init__(self, gang: InProcessGang) -> None:
        self.gang, self.blocks = gang, GangBlocks()

    def look(self) -> list[int]:
        """Judge what the agents report now; returns the stragglers."""
        for node in self.gang.nodes.values():
            found = node.checkpoint_service.block_times().items()
            ranks = tuple(
                RankState(
                    rank, 1, True,
                    block_times=BlockTimes(times.first_block, tuple(times.compute_us), tuple(times.wait_us)),
                )
                for rank, times in found
            )  # fmt: skip
            self.blocks.note_status(AgentStatus(ranks=ranks))
        for block in self.blocks.take_whole(len(PLACES)):
            follow(self.blocks.paces, block, 0.0)
        return [rank for rank, slow in self.blocks.paces.slow_ranks.items() if slow.named]


async def start(gang: InProcessGang, log: Path) -> asyncio.subprocess.Process:
    descriptors = {rank: gang.socket(rank, node) for rank, node in PLACES.items()}
    job = {"ranks": descriptors, "generation": 1, "slow_rank": SLOW_RANK, "slow_from": SLOW_FROM, "steps": STEPS}
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            SCRIPT,
            json.dumps(job),
            env=env,
            pass_fds=list(descriptors.values()),
            stdout=out,
            stderr=out,
        )
    for descriptor in descriptors.values():
        os.close(descriptor)
    return process


async def test_the_slow_rank_is_named_within_20_steps_and_nobody_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gang = InProcessGang("g")
    await gang.add(*dict.fromkeys(PLACES.values()))
    gang.begin(PLACES)
    watch, log = Watch(gang), tmp_path / "log"
    process = await start(gang, log)
    try:
        async with asyncio.timeout(120):
            while not watch.look():
                assert process.returncode is None, log.read_text()[-3000:]
                await asyncio.sleep(0.01)
            judged = STEPS_PER_BLOCK * (watch.blocks.last_taken + 1)
            slow = watch.blocks.paces.slow_ranks[SLOW_RANK]
            with capsys.disabled():
                print(f"\nslow from step {SLOW_FROM} on, named by step {judged}: {slow.slower_by:.0%} longer")
            assert watch.look() == [SLOW_RANK]
            assert SLOW_FROM <= judged < SLOW_FROM + 20
            assert await process.wait() == 0, log.read_text()[-3000:]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await gang.close()
