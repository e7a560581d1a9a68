"""With every="auto", the agents measure what snapshots cost, and the leader's agent tells rank 0 how far apart to take
them. The ranks write bytes, not tensors."""

import asyncio

from tests.unit.test_checkpoint_service import Gang, own, replica, running_gang

from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.commit.snapshot_interval import ENOUGH_SAMPLES
from muster.checkpoint.training.agent_connection import FIRST_PERIOD, SnapshotCost
from muster.v1 import agent_pb2

PLACES = {0: "a", 1: "b"}
STEPS = ENOUGH_SAMPLES + 2


async def train(gang: Gang, *, auto: bool) -> None:
    """Rank 0 reports 1 µs for each snapshot, less than any step takes, and rank 1 50 ms."""
    for step in range(1, STEPS + 1):
        for rank, one in gang.ranks.items():
            cost = SnapshotCost(0.05 if rank else 1e-6, auto=auto)
            assert await asyncio.to_thread(one.step, step, replica(step)(rank), own(rank, step), 5.0, cost=cost)
        await gang.committed(Version(1, step))


def cost_of(gang: Gang, node: str) -> agent_pb2.SnapshotCost | None:
    return gang.nodes[node].checkpoint_service.snapshot_cost()


async def test_the_leader_knows_what_the_slowest_rank_pays() -> None:
    async with running_gang() as gang:
        await gang.add("a", "b")
        await gang.run(PLACES)
        assert cost_of(gang, "a") is None
        await train(gang, auto=False)
        cost = cost_of(gang, "a")
        assert cost is not None
        assert (cost.every, cost.auto_interval, cost.stall_us) == (1, False, 50_000)
        assert cost.step_us > 0
        assert cost.slots_us > 0, "the slots were made before the first snapshot"
        assert cost_of(gang, "b") is None, "rank 0 is elsewhere"
        assert gang.ranks[0].connection.advised_interval == (1, FIRST_PERIOD), "the user has set the interval"


async def test_rank_0_is_told_the_best_interval() -> None:
    async with running_gang() as gang:
        await gang.add("a", "b")
        await gang.run(PLACES)
        await train(gang, auto=True)
        connection = gang.ranks[0].connection
        connection.read_pending()
        every, period = connection.advised_interval
        assert every > 1, "50 ms are far more than a thousandth of such steps"
        assert period >= FIRST_PERIOD
        assert gang.ranks[1].connection.advised_interval == (1, FIRST_PERIOD), "rank 0 tells it"


async def test_the_next_generation_measures_again() -> None:
    async with running_gang() as gang:
        await gang.add("a", "b")
        await gang.run(PLACES)
        await train(gang, auto=True)
        await gang.run(PLACES, gang.plan(Version(1, STEPS)))
        assert cost_of(gang, "a") is None
