"""A node that was given up and is heard again: whichever sign of life comes, and whatever stream brings it."""

from __future__ import annotations

import pytest

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState, apply
from muster.daemon.coordinator.core.state.state_tables import Verdict

HELLO = events.NodeAttached("n1", "boot", "incarnation", "10.0.0.1:7071")


def core_with(verdict: Verdict) -> Core:
    """A core that knows one node, whose stream is open, by that verdict."""
    core = Core(DurableState(), 1000.0)
    core.decide(HELLO, 1000.0)
    if verdict is not Verdict.FIT:
        apply(core.state, facts.NodeJudged("n1", verdict, "why"), 1001.0)
    return core


@pytest.mark.parametrize("verdict", [Verdict.LOST, Verdict.HUNG])
@pytest.mark.parametrize("sign", [HELLO, events.NodeHeard("n1")])
def test_any_sign_of_life_brings_a_silent_node_back(verdict: Verdict, sign: events.Event) -> None:
    """A link that is mended within seconds, or a host that was paused, keeps its stream: there is no new hello."""
    core = core_with(verdict)
    assert core.decide(sign, 1005.0).facts == [facts.NodeJudged("n1", Verdict.RETURNING, "its daemon is heard again")]
    assert core.decide(events.NodeHeard("n1"), 1010.0).facts == []
    assert core.decide(events.NodeSeen("n1", True, "in service in Slurm (IDLE)"), 1011.0).facts == [
        facts.NodeJudged("n1", Verdict.FIT, "in service in Slurm (IDLE)")
    ]


@pytest.mark.parametrize("verdict", [Verdict.FIT, Verdict.DEGRADED, Verdict.UNFIT])
def test_the_heartbeats_of_others_change_nothing(verdict: Verdict) -> None:
    core = core_with(verdict)
    assert core.decide(events.NodeHeard("n1"), 1005.0).facts == []
    assert core.state.node("n1").verdict is verdict
