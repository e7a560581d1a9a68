"""Muster resumes a node that it drained itself, and that has passed a check since: where the site asks for it."""

import asyncio
from dataclasses import replace

import pytest

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import CheckOutcome, NodeCheck, SlurmDrain
from muster.daemon.coordinator.core.state.fact_text import describe
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.services.roll_call import roll_call
from muster.daemon.coordinator.slurm.owed_calls import make_call
from muster.daemon.coordinator.slurm.roster import SlurmRoster
from muster.daemon.coordinator.slurm.watch import node_seen
from muster.node_health import NodeHealth
from muster.slurm.client.errors import SlurmRefused
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm
from muster.slurm.client.states import NodeState
from muster.slurm.client.types import Node

DAY_S = 86400.0
LIMITS = Limits(nodes_per_hour=1000, fraction=1.0, nodes_at_least=1000, lemon_after=9, resume_after_check=True)
PASSED = NodeCheck(CheckOutcome.PASSED, gflops=50.0)


class Site:
    """A coordinator, Slurm in memory, and node daemons that report what a check finds."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.now = 1_000.0
        self.cluster = FakeCluster(("n1", "n2"), now=lambda: self.now)
        self.slurm = FakeSlurm(self.cluster)
        self.limits = limits
        self.core = Core(DurableState(), self.now, limits)
        self.facts: list[facts.Fact] = []
        for name in ("n1", "n2"):
            self.decide(events.NodeAttached(name, "boot1", "a", f"{name}:7071"))
        self.poll()

    def decide(self, event: events.Event) -> None:
        self.facts += self.core.decide(event, self.now).facts

    def poll(self) -> None:
        """Let a second pass, and show the core what Slurm has of each node."""
        self.now += 1.0
        for name, node in self.cluster.nodes().items():
            self.decide(node_seen(name, node))

    def settle(self) -> str | None:
        """Make the oldest owed call, and return Slurm's refusal."""
        call, error = self.core.state.owed[min(self.core.state.owed)], None
        try:
            asyncio.run(make_call(self.slurm, call, self.core.state))
        except SlurmRefused as refused:
            error = str(refused)
        self.decide(events.SlurmAnswered("", call.call, error))
        return error

    def fail(self, name: str = "n1") -> None:
        """The hardware of a node reports a fatal fault, and Slurm drains the node."""
        self.decide(events.NodeSignalled(name, "unfit", "Xid 79", "text"))
        self.settle()
        self.poll()

    def wanted(self, name: str = "n1") -> str:
        return self.core.wanted_check(name, self.now)

    def report(self, check: NodeCheck = PASSED, name: str = "n1") -> None:
        """The daemon makes the check that it is asked for."""
        self.decide(events.NodeCheckReported(name, self.wanted(name), check))

    def restart(self, **limits: object) -> None:
        """Another coordinator continues with the journal, and with other limits."""
        self.limits = replace(self.limits, **limits)  # type: ignore[arg-type]
        self.core = Core(DurableState.load(self.core.state.dump()), self.now, self.limits)

    @property
    def owed(self) -> list[str]:
        return [call.verb for call in self.core.state.owed.values()]

    def node(self, name: str = "n1") -> Node:
        return self.cluster.nodes()[name]


def resumed(site: Site) -> bool:
    """Carry out what the core owes, and look whether the node is in service again."""
    if "resume" in site.owed:
        site.settle()
    site.poll()
    return not site.node().drained and site.core.state.node("n1").health is NodeHealth.FIT


def test_a_node_that_muster_drained_is_resumed_once_it_has_passed_a_check() -> None:
    site = Site()
    site.fail()
    assert site.wanted()
    assert not site.wanted("n2")
    site.report()
    assert [describe(fact) for fact in site.facts[-2:]] == [
        "the node check of n1: musterd checks whether to resume the node: passed",
        "Slurm call 2: resume n1, if its drain still has this reason: muster: [node] Xid 79",
    ]
    assert resumed(site)
    assert not site.wanted()
    assert site.core.state.node("n1").check == PASSED


def test_the_default_resumes_nothing() -> None:
    site = Site(replace(LIMITS, resume_after_check=False))
    site.fail()
    assert not site.wanted()
    site.decide(events.NodeCheckReported("n1", f"{site.core.state.node('n1').judged_at:.3f} boot1", PASSED))
    assert not resumed(site)


@pytest.mark.parametrize(
    "check",
    [
        *(NodeCheck(outcome, gflops=50.0) for outcome in CheckOutcome if outcome is not CheckOutcome.PASSED),
        NodeCheck(CheckOutcome.PASSED, "only the inventory"),
    ],
)
def test_a_node_that_has_not_passed_stays_drained_until_its_next_boot(check: NodeCheck) -> None:
    site = Site()
    site.fail()
    site.report(check)
    assert not resumed(site)
    assert not site.wanted()
    site.decide(events.NodeAttached("n1", "boot2", "b", "n1:7071"))
    site.report()
    assert resumed(site)


def test_a_check_that_nobody_asked_for_counts_nothing() -> None:
    site = Site()
    site.fail()
    site.decide(events.NodeCheckReported("n1", "of another verdict", PASSED))
    site.decide(events.NodeCheckReported("n2", "", PASSED))
    assert not any(isinstance(fact, facts.NodeChecked) for fact in site.facts)
    assert not resumed(site)


@pytest.mark.parametrize(
    ("states", "idle"),
    [
        ({NodeState.IDLE, NodeState.DRAIN}, True),
        ({NodeState.DOWN, NodeState.DRAIN}, True),
        ({NodeState.ALLOCATED, NodeState.DRAIN}, False),
        ({NodeState.IDLE, NodeState.DRAIN, NodeState.COMPLETING}, False),
    ],
)
def test_a_drained_node_is_idle_once_nothing_of_a_job_is_left(states: set[NodeState], idle: bool) -> None:
    seen = node_seen("n1", Node("n1", frozenset(states), reason="a fan"))
    assert seen.drain == SlurmDrain("a fan", idle)


def test_a_check_is_asked_for_only_when_the_job_has_left_the_node() -> None:
    site = Site()
    site.fail()
    site.decide(events.SlurmNodeChanged("n1", False, "", drain=SlurmDrain("muster: [node] Xid 79", idle=False)))
    assert not site.wanted()


@pytest.mark.parametrize("reason", ["fan broken, ticket 7", "muster: [user] root: firmware", "muster: [node] Xid 48"])
def test_a_reason_that_somebody_has_changed_is_never_touched(reason: str) -> None:
    site = Site()
    site.fail()
    site.cluster.drain("n1", reason)
    site.poll()
    assert not site.wanted()
    assert not resumed(site)


def test_a_reason_that_changes_while_the_resume_is_owed_makes_slurm_refuse_it() -> None:
    site = Site()
    site.fail()
    site.report()
    site.cluster.drain("n1", "fan broken, ticket 7")
    assert (
        site.settle()
        == "Slurm refused to resume n1: somebody has changed the reason of its drain: fan broken, ticket 7"
    )
    assert not resumed(site)
    assert site.node().reason == "fan broken, ticket 7"


def test_a_node_that_somebody_had_drained_before_stays_drained() -> None:
    """Muster's reason replaces theirs in Slurm."""
    site = Site()
    site.cluster.drain("n1", "fan broken, ticket 7")
    site.poll()
    site.fail()
    assert site.node().reason == "muster: [node] Xid 79"
    assert not site.wanted()


def test_a_node_that_somebody_drains_while_muster_decides_keeps_their_reason() -> None:
    """Slurm's last answer is older than their drain."""
    site = Site()
    site.cluster.drain("n1", "fan broken, ticket 7")
    site.fail()
    assert site.node().reason == "fan broken, ticket 7"
    assert not site.wanted()


def test_a_dead_node_that_somebody_drains_while_muster_decides_keeps_their_reason_and_is_down() -> None:
    site = Site()
    site.decide(events.NodeSignalled("n1", "unfit", "Xid 79", "text"))
    (drain,) = site.core.state.owed.values()
    site.cluster.drain("n1", "fan broken, ticket 7")
    asyncio.run(make_call(site.slurm, replace(drain, verb="down"), site.core.state))
    assert (site.node().down, site.node().reason) == (True, "fan broken, ticket 7")


def test_a_drain_that_an_operator_has_requested_is_no_fault_to_be_checked() -> None:
    site = Site()
    site.decide(events.DrainRequested("n1", "root", "firmware"))
    site.settle()
    site.poll()
    assert not site.wanted()


def test_a_node_that_fails_again_within_a_day_is_left_to_an_operator() -> None:
    site = Site()
    site.fail()
    site.report()
    assert resumed(site)
    site.now += DAY_S / 2
    site.fail()
    assert not site.wanted()
    site.decide(events.NodeAttached("n1", "boot2", "b", "n1:7071"))
    site.now += 3 * DAY_S
    assert not site.wanted()
    site.cluster.resume("n1")  # by an operator
    site.poll()
    site.fail()
    assert site.wanted()


def test_a_node_that_fails_again_after_a_day_is_checked_again() -> None:
    site = Site()
    site.fail()
    site.report()
    assert resumed(site)
    site.now += 1.5 * DAY_S
    site.fail()
    assert site.wanted()


def test_a_lemon_is_never_resumed() -> None:
    site = Site(replace(LIMITS, lemon_after=2))
    site.fail()
    site.report()
    assert resumed(site)
    site.now += 5 * DAY_S
    site.fail()
    assert not site.wanted()


def said(site: Site, name: str = "n1") -> str:
    """Why the node is in its state, as `muster nodes` says it."""
    views = roll_call(site.core.state, site.core.observed, SlurmRoster(site.slurm), (), site.now, site.limits)
    return next(view.reason for view in views if view.node == name)


def test_the_roll_call_says_whether_a_node_is_resumed_and_why_not() -> None:
    site = Site(replace(LIMITS, lemon_after=2))
    site.fail()
    assert said(site) == "Xid 79; Muster resumes it once it passes a check"
    site.report()
    assert resumed(site)
    assert said(site).startswith("in service again: ")
    site.now += 5 * DAY_S
    site.fail()
    assert said(site) == "Xid 79; Muster does not resume it: it is a lemon"
    site.limits = replace(site.limits, resume_after_check=False)
    assert said(site) == "Xid 79", "an operator resumes nodes there anyway"


def test_no_more_nodes_are_resumed_within_the_hour_than_the_site_allows() -> None:
    site = Site()
    site.fail("n1")
    site.fail("n2")
    site.restart(nodes_per_hour=1)
    site.poll()
    site.report(name="n1")
    assert not site.wanted("n2")
    assert resumed(site)
    assert not site.wanted("n2")
    site.now += 3_600.0
    assert site.wanted("n2")


def test_in_observe_mode_nothing_is_resumed() -> None:
    site = Site()
    site.fail()
    site.restart(observe=True)
    site.poll()
    assert not site.wanted()


def test_another_coordinator_goes_on_once_slurm_has_answered_it() -> None:
    site = Site()
    site.fail()
    wanted = site.wanted()
    site.restart()
    assert not site.wanted()
    site.poll()
    assert site.wanted() == wanted
    site.report()
    site.restart()
    assert site.owed == ["resume"]
    assert resumed(site)
    site.restart()
    site.poll()
    site.fail()
    assert not site.wanted()


def test_a_resume_that_is_made_twice_does_no_harm() -> None:
    site = Site()
    site.fail()
    site.report()
    call = next(iter(site.core.state.owed.values()))
    asyncio.run(make_call(site.slurm, call, site.core.state))
    assert site.settle() is None
    assert resumed(site)


def test_a_node_that_has_fallen_silent_meanwhile_is_not_resumed() -> None:
    site = Site()
    site.fail()
    site.report()
    site.core.state.nodes["n1"].health = NodeHealth.LOST
    assert site.settle() == "Slurm refused to resume n1: the node is LOST meanwhile, or an operator drains it"
    assert site.node().drained
