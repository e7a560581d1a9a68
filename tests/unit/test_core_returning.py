"""A LOST or HUNG node that is heard again: any sign of life on any stream makes it RETURNING."""

from __future__ import annotations

import pytest

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.node_health import NodeHealth

HELLO = events.NodeAttached("n1", "boot", "incarnation", "10.0.0.1:7071")


def core_with(verdict: NodeHealth) -> Core:
    """A core that knows one node with that health. The stream of its daemon is open."""
    core = Core(DurableState(), 1000.0)
    core.decide(HELLO, 1000.0)
    if verdict is not NodeHealth.FIT:
        apply(core.state, facts.NodeJudged("n1", verdict, "why"), 1001.0)
    return core


@pytest.mark.parametrize("verdict", [NodeHealth.LOST, NodeHealth.HUNG])
@pytest.mark.parametrize("sign", [HELLO, events.NodeHeartbeat("n1")])
def test_any_sign_of_life_brings_a_silent_node_back(verdict: NodeHealth, sign: events.Event) -> None:
    """A link that heals within seconds, or a host that was frozen, keeps its stream: no new hello is sent."""
    core = core_with(verdict)
    assert core.decide(sign, 1005.0).facts == [
        facts.NodeJudged("n1", NodeHealth.RETURNING, "its daemon is heard again")
    ]
    assert core.decide(events.NodeHeartbeat("n1"), 1010.0).facts == []
    assert core.decide(events.SlurmNodeChanged("n1", True, "in service in Slurm (IDLE)"), 1011.0).facts == [
        facts.NodeJudged("n1", NodeHealth.FIT, "in service in Slurm (IDLE)")
    ]


@pytest.mark.parametrize("verdict", [NodeHealth.FIT, NodeHealth.DEGRADED, NodeHealth.UNFIT])
def test_the_heartbeats_of_others_change_nothing(verdict: NodeHealth) -> None:
    core = core_with(verdict)
    assert core.decide(events.NodeHeartbeat("n1"), 1005.0).facts == []
    assert core.state.node("n1").health is verdict
