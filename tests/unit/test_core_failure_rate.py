"""How often nodes fail: configured, or observed for the fleet."""

import pytest

from muster.daemon.coordinator.core.detection.failure_rate import job_mtbf_s, observed_node_mtbf_s
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import GangSpec
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.fabric.estimate.failures import HOUR, NODE_MTBF
from muster.node_health import NodeHealth

DAY = 24 * HOUR
START = 1e9


def fleet(nodes: int) -> DurableState:
    state = DurableState()
    for number in range(nodes):
        apply(state, facts.NodeRegistered(f"n{number}", "boot", "addr:1"), START)
    return state


def fails(state: DurableState, node: str, at: float) -> None:
    apply(state, facts.NodeJudged(node, NodeHealth.LOST, "no answer", failure=1), at)


def test_without_any_observation_the_published_rate_counts() -> None:
    assert observed_node_mtbf_s(DurableState(), 8, START) == NODE_MTBF
    assert observed_node_mtbf_s(DurableState(), 4, START) == 2 * NODE_MTBF


def test_what_is_observed_outweighs_the_published_rate_in_time() -> None:
    state = fleet(100)
    for number in range(9):
        fails(state, f"n{number}", START + 20 * DAY)
    watched = 100 * 25 * DAY
    assert observed_node_mtbf_s(state, 8, START + 25 * DAY) == pytest.approx((NODE_MTBF + watched) / 10)


def test_only_the_last_thirty_days_count() -> None:
    state = fleet(10)
    fails(state, "n0", START + DAY)
    later = START + 100 * DAY
    assert observed_node_mtbf_s(state, 8, later) == pytest.approx(NODE_MTBF + 10 * 30 * DAY)


def test_the_job_knows_better_than_the_site_and_the_site_better_than_the_coordinator() -> None:
    state = fleet(3)
    spec = GangSpec(4, 0, ranks_per_node=8)
    assert job_mtbf_s(state, Limits(), spec, 4, START) == NODE_MTBF / 4
    assert job_mtbf_s(state, Limits(node_mtbf_hours=100), spec, 4, START) == 25 * HOUR
    own = GangSpec(4, 0, ranks_per_node=8, node_mtbf_s=40 * HOUR)
    assert job_mtbf_s(state, Limits(node_mtbf_hours=100), own, 4, START) == 10 * HOUR
