"""More than one replica of each shard: copies = 3 in job.toml."""

from tests.unit.test_checkpoint_service import BUDDY, FOUR, held, own, running_gang, sharded, until

from muster.checkpoint.format.versions import Version
from muster.checkpoint.testing.gang_in_one_process import contents


async def test_with_three_copies_two_nodes_may_be_lost_at_once() -> None:
    async with running_gang() as gang:
        gang.more_copies = 1
        await gang.add(*FOUR.values(), "spare0", "spare1")
        await gang.run(FOUR)
        for step in (1, 2):
            await gang.step(step, sharded(step))
            await gang.committed(Version(1, step))
        assert {node for node in gang.nodes if (BUDDY, 0, 1, 2) in held(gang, node)} == {"n1", "n2"}
        await gang.lose("n0")
        await gang.lose("n1")
        starts = await gang.run({**FOUR, 0: "spare0", 1: "spare1"}, gang.plan(Version(1, 2)))
        for rank, start in starts.items():
            assert start.shard is not None
            assert contents(start.shard)["own"] == own(rank, 2)
        await gang.step(3, sharded(3))
        await gang.committed(Version(2, 3))


async def test_no_step_is_committed_before_each_of_several_buddies_has_it() -> None:
    async with running_gang() as gang:
        gang.more_copies = 1
        await gang.add(*FOUR.values())
        await gang.run(FOUR)
        gang.nodes["n2"].transport.flows.clear()
        await gang.step(1, sharded(1))
        await until(lambda: (BUDDY, 0, 1, 1) in held(gang, "n1"))
        assert gang.nodes["n0"].committed() < Version(1, 1)
        gang.nodes["n2"].transport.flows.set()
        await gang.committed(Version(1, 1))
