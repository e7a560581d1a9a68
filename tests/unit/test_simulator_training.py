"""The simulated ranks of one generation: what they do once a hang is over."""

import pytest

from muster.simulator.scenario import Scenario
from muster.simulator.world.training import Training


def training(world: Scenario) -> Training:
    """The training of a gang whose ranks have joined, before their first step."""
    world.run_until(lambda: (newest := world.world.newest_training("g")) is not None and newest.began)
    newest = world.world.newest_training("g")
    assert newest is not None
    return newest


def test_ranks_that_hung_a_step_behind_the_others_finish_that_step() -> None:
    """Otherwise the first version would never be whole, and no other one be kept."""
    world = Scenario(3, 0)
    ranks = training(world)
    world.hang_rank("n1", "behind")
    world.run_for(1.0)
    steps = {rank.agent.node: rank.step for rank in ranks.ranks.values()}
    assert steps["n0"] == steps["n2"] == steps["n1"] + 1
    for rank in ranks.ranks.values():
        ranks.end_hang(rank)
    world.run_for(5.0)
    committed = world.agent("n0").memory.committed
    assert committed is not None
    assert committed.step > steps["n0"] + 3


def test_ranks_wait_for_one_that_hangs_since_their_declared_phase_is_over() -> None:
    world = Scenario(2, 0)
    ranks = training(world)
    world.declared_phase("10")
    world.hang_rank("n1")
    world.run_for(9.0)
    assert ranks.idle_since == float("inf")
    world.run_for(3.0)
    assert ranks.idle_s(world.now, 0.0) == pytest.approx(2.0)
