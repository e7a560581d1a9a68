"""What a node knows of its own health: the coordinator's last word, or its own until the coordinator answers."""

import pytest

from muster.daemon.node.own_verdict import OwnVerdict, Verdict
from muster.daemon.node.sensors.sensor import Observation
from muster.v1 import node_pb2 as pb

UNFIT_XIDS = pb.UnfitSignals(kind="xid", codes=[48, 79])
LOST = Observation("xid", 79, "0000:3b:00", "GPU has fallen off the bus: a quotation", 1.5)


@pytest.fixture
def own() -> OwnVerdict:
    """As a node is that the coordinator holds to be fit."""
    own = OwnVerdict()
    own.take_answer(pb.NodeOrder(unfit=[UNFIT_XIDS]), None, to_hello=True)
    return own


def test_a_node_that_the_coordinator_has_not_judged_is_fit() -> None:
    assert OwnVerdict().current().fit


def test_the_coordinators_verdict_counts(own: OwnVerdict) -> None:
    own.take_answer(pb.NodeOrder(verdict="UNFIT", verdict_reason="Xid 48"), None)
    assert own.current() == Verdict("UNFIT", "Xid 48")
    assert not own.current().fit
    own.take_answer(pb.NodeOrder(), None)
    assert own.current() == Verdict("FIT", "")


@pytest.mark.parametrize(
    ("verdict", "fit"),
    [("FIT", True), ("SUSPECT", True), ("DEGRADED", True), ("UNFIT", False), ("LOST", False), ("HUNG", False),
     ("RETURNING", False), ("a later release's", False)],
)  # fmt: skip
def test_a_node_in_service_may_run_jobs(own: OwnVerdict, verdict: str, fit: bool) -> None:
    own.take_answer(pb.NodeOrder(verdict=verdict), None)
    assert own.current().fit is fit


def test_a_signal_that_the_policy_calls_unfit_counts_at_once(own: OwnVerdict) -> None:
    own.observe(LOST)
    assert own.current() == Verdict("UNFIT", "xid 79 on 0000:3b:00; the coordinator has not answered yet", True)


@pytest.mark.parametrize(("kind", "code"), [("xid", 13), ("sxid", 79), ("xid-over", 79)])
def test_other_signals_are_the_coordinators_to_judge(own: OwnVerdict, kind: str, code: int) -> None:
    own.observe(Observation(kind, code, "", "", 1.5))
    assert own.current().fit


@pytest.mark.parametrize(("code", "fit"), [(13, True), (14, False)])
def test_a_kind_can_be_unfit_but_for_some_codes(code: int, fit: bool) -> None:
    own = OwnVerdict()
    own.take_answer(pb.NodeOrder(unfit=[pb.UnfitSignals(kind="mce", codes=[13], all_but=True)]), None, to_hello=True)
    own.observe(Observation("mce", code, "", "", 1.5))
    assert own.current().fit is fit


def test_the_answer_to_a_signal_does_not_hold_the_decision_yet(own: OwnVerdict) -> None:
    own.observe(LOST)
    own.take_answer(pb.NodeOrder(), LOST)
    assert own.current().name == "UNFIT"


def test_the_next_heartbeats_answer_is_the_decision(own: OwnVerdict) -> None:
    own.observe(LOST)
    own.take_answer(pb.NodeOrder(), LOST)
    own.take_answer(pb.NodeOrder(verdict="DEGRADED", verdict_reason="a limit"), None)
    assert own.current() == Verdict("DEGRADED", "a limit")


def test_an_answer_that_was_on_its_way_is_no_decision(own: OwnVerdict) -> None:
    own.observe(LOST)
    own.take_answer(pb.NodeOrder(), None)
    assert own.current().name == "UNFIT"


def test_a_second_signal_waits_for_its_own_answer(own: OwnVerdict) -> None:
    own.observe(LOST)
    own.take_answer(pb.NodeOrder(), LOST)
    own.observe(Observation("xid", 48, "0000:5e:00", "", 2.5))
    own.take_answer(pb.NodeOrder(), None)
    assert own.current().reason.startswith("xid 48 on 0000:5e:00")


def test_a_coordinator_that_only_observes_takes_the_nodes_own_word_from_it(own: OwnVerdict) -> None:
    own.take_answer(pb.NodeOrder(), None, to_hello=True)
    own.observe(LOST)
    assert own.current().fit
