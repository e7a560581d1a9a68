"""Lemons: a node that fails again and again within 30 days is named, in the events and by `muster nodes`."""

import pytest

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.detection import circuit_breaker, failure_rate
from muster.daemon.coordinator.core.detection.drain_reason import DrainSource
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.fact_text import describe
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.turn.state_updates import FAILURES_KEPT
from muster.daemon.coordinator.core.turn.turn import Turn
from muster.launcher.output.node_tables import node_lines
from muster.launcher.output.screen import Screen
from muster.node_health import NodeHealth
from muster.v1.api_pb2 import NodeView

DAY_S = 86400.0
LIMITS = Limits(lemon_after=3, nodes_per_hour=1000, fraction=1.0, nodes_at_least=1000)


class Site:
    """A coordinator to which nodes report fatal signals, and whose operators resume the nodes."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.core, self.now = Core(DurableState(), 0.0, limits), 0.0

    def fail(self, node: str, at: float) -> facts.NodeJudged:
        """The node fails, and is repaired an hour later."""
        self.now = at
        outcome = self.core.decide(events.NodeSignalled(node, "unfit", "Xid 79", "text"), at)
        self.core.decide(events.SlurmAnswered("", self.core.state.last_call, None), at + 1.0)
        self.core.decide(events.SlurmNodeChanged(node, False, "out of service"), at + 2.0)
        self.core.decide(events.SlurmNodeChanged(node, True, "in service"), at + 3600.0)
        assert self.core.state.node(node).health is NodeHealth.FIT
        return next(fact for fact in outcome.facts if isinstance(fact, facts.NodeJudged))


def test_a_node_that_fails_a_third_time_within_30_days_is_a_lemon() -> None:
    site = Site()
    judged = [site.fail("n1", day * DAY_S) for day in (1, 10, 29)]
    assert [(one.failure, one.lemon) for one in judged] == [(1, False), (2, False), (3, True)]
    assert describe(judged[2]) == "node n1 is UNFIT: Xid 79; a lemon: failure 3 within 30 days"
    assert describe(judged[1]) == "node n1 is UNFIT: Xid 79"


def test_a_failure_of_long_ago_counts_no_more() -> None:
    site = Site()
    judged = [site.fail("n1", day * DAY_S) for day in (1, 10, 32)]
    assert (judged[2].failure, judged[2].lemon) == (2, False)
    assert failure_rate.failures(site.core.state, "n1", 32 * DAY_S) == 2
    assert failure_rate.failures(site.core.state, "n1", 70 * DAY_S) == 0


def test_each_node_counts_for_itself() -> None:
    site = Site()
    judged = [site.fail(node, day * DAY_S) for day, node in enumerate(("n1", "n2", "n1", "n3", "n2"))]
    assert [one.failure for one in judged] == [1, 1, 2, 1, 2]


def test_a_site_may_want_no_lemons() -> None:
    site = Site(Limits(lemon_after=0, nodes_per_hour=1000, fraction=1.0, nodes_at_least=1000))
    assert not any(site.fail("n1", day * DAY_S).lemon for day in range(9))


def test_a_node_that_is_out_of_service_does_not_fail_again() -> None:
    site = Site()
    site.core.decide(events.NodeSignalled("n1", "unfit", "Xid 79", ""), 1.0)
    site.core.decide(events.NodeSignalled("n1", "unfit", "Xid 48", ""), 2.0)
    assert failure_rate.failures(site.core.state, "n1", 3.0) == 1


@pytest.mark.parametrize(("source", "count"), [(DrainSource.NODE, 1), (DrainSource.USER, 0)])
def test_a_drain_that_somebody_has_asked_for_is_no_failure(source: DrainSource, count: int) -> None:
    core = Core(DurableState(), 0.0, LIMITS)
    turn = Turn(core.state, core.observed, core.index, 1.0, limits=LIMITS)
    circuit_breaker.take_out_of_service(turn, None, "n1", NodeHealth.UNFIT, "firmware", source)
    assert failure_rate.failures(core.state, "n1", 2.0) == count


def test_what_only_the_agents_of_a_job_report_makes_no_lemon() -> None:
    """The owner of a job can make them report anything."""
    core = Core(DurableState(), 0.0, LIMITS)
    call = facts.SlurmCallOwed("g", 1, "drain", 1, "n1", "muster: [node] ranks could not be killed", if_run_has_node=0)
    turn = Turn(core.state, core.observed, core.index, 1.0, limits=LIMITS)
    circuit_breaker.judge_drained(turn, call)
    assert core.state.node("n1").health is NodeHealth.UNFIT
    assert failure_rate.failures(core.state, "n1", 2.0) == 0


def test_the_failures_survive_a_restart_and_are_bounded() -> None:
    site = Site()
    for number in range(FAILURES_KEPT + 5):
        site.fail("n1", number * 7200.0)
    assert failure_rate.failures(site.core.state, "n1", site.now) == FAILURES_KEPT
    assert DurableState.load(site.core.state.dump()).failed_at == site.core.state.failed_at
    site.fail("n2", site.now + 40 * DAY_S)
    assert site.core.state.failed_at.keys() == {"n2"}


def test_muster_nodes_names_a_lemon() -> None:
    nodes = [
        NodeView(node="n1", verdict="FIT", failures=3, lemon=True, heard_s_ago=1.0),
        NodeView(node="n2", verdict="UNFIT", failures=2, reason="Xid 79", heard_s_ago=1.0),
        NodeView(node="n3", verdict="UNFIT", failures=4, lemon=True, reason="Xid 79", heard_s_ago=1.0),
    ]
    lines = list(node_lines(nodes, Screen(200)))
    assert lines[1].endswith("  a lemon: 3 failures within 30 days")
    assert lines[2].endswith("  Xid 79")
    assert "lemon" not in lines[2]
    assert lines[3].endswith("  a lemon: 4 failures within 30 days; Xid 79")
