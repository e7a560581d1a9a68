"""Eight gloo ranks with the library's lines, of which one becomes 30 % slower: from its hooks to the core's verdict."""

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("torch")

from muster.checkpoint.store.block_times import STEPS_PER_BLOCK
from muster.checkpoint.testing.gang_in_one_process import InProcessGang, reported
from muster.checkpoint.testing.rank_processes import RankScript, start_ranks
from muster.daemon.coordinator.core.detection.straggler_evidence import follow
from muster.daemon.coordinator.core.state.block_times import GangBlocks
from muster.daemon.coordinator.core.state.events import AgentStatus, BlockTimes, RankState

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parent / "straggler_script.py"
PLACES = {rank: f"n{rank // 4}" for rank in range(8)}
SLOW_RANK, SLOW_FROM, STEPS = 5, 102, 208
BLOCKS_AHEAD = 4
"""Blocks that the gang may be ahead of what was judged. An agent keeps the newest eight."""


class Watch:
    """What the coordinator would see of the gang."""

    def __init__(self, gang: InProcessGang) -> None:
        self.gang, self.blocks = gang, GangBlocks()

    def look(self) -> list[int]:
        """Judge what the agents report now; returns the stragglers."""
        for name, node in self.gang.nodes.items():
            statuses = [reported(node.checkpoint_service, rank) for rank, of in PLACES.items() if of == name]
            ranks = tuple(
                RankState(
                    status.rank, 1, True,
                    block_times=BlockTimes(times.first_block, tuple(times.compute_us), tuple(times.wait_us)),
                )
                for status in statuses if (times := status.block_times).compute_us
            )  # fmt: skip
            self.blocks.note_status(AgentStatus(ranks=ranks))
        for block in self.blocks.take_whole(len(PLACES)):
            follow(self.blocks.paces, block, 4, 0.0)
        return list(self.blocks.paces.stragglers)


async def lead(process: RankScript, watch: Watch, log: Path) -> None:
    """Let the gang go on, block by block, until a straggler is named."""
    permitted = 0
    async with asyncio.timeout(120):
        while not watch.look():
            assert process.returncode is None, log.read_text()[-3000:]
            allowed = watch.blocks.last_taken + 1 + BLOCKS_AHEAD
            process.write(b"." * (allowed - permitted))
            permitted = allowed
            await asyncio.sleep(0.01)
    process.write(b"." * STEPS)


async def test_the_slow_rank_is_named_within_100_steps_and_nobody_before(tmp_path: Path) -> None:
    gang = InProcessGang("g")
    await gang.add(*dict.fromkeys(PLACES.values()))
    gang.begin(PLACES)
    watch, log = Watch(gang), tmp_path / "log"
    job = {"slow_rank": SLOW_RANK, "slow_from": SLOW_FROM, "steps": STEPS, "block": STEPS_PER_BLOCK}
    sockets = {rank: gang.socket(rank, node) for rank, node in PLACES.items()}
    process = await start_ranks(SCRIPT, len(PLACES), sockets, log, job)
    try:
        await lead(process, watch, log)
        judged = STEPS_PER_BLOCK * (watch.blocks.last_taken + 1)
        assert watch.look() == [SLOW_RANK]
        assert 0.29 < watch.blocks.paces.ranks[SLOW_RANK].slower_by < 0.31
        assert SLOW_FROM <= judged < SLOW_FROM + 100
        assert await process.wait() == 0, log.read_text()[-3000:]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await gang.close()
