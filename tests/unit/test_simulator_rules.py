"""`python -m muster.simulator.planted_bugs --rules` finds what fails without a rule."""

from muster.simulator.planted_bugs.catalogue import PLANTED_BUGS
from muster.simulator.planted_bugs.rules import rules


def test_a_rule_is_found_by_its_words_with_all_that_checks_it() -> None:
    """No node is evicted on the coordinator's word."""
    places = [rule.where for rule in rules(["quorum"])]
    assert "simulator/invariants/node_health.py" in places
    assert any(place.endswith("planted_bugs trust-the-coordinator-alone") for place in places)
    assert any(place.startswith("tests/unit/test_core_") for place in places)
    assert len(places) < 60


def test_every_planted_bug_is_listed_with_its_module() -> None:
    listed = [rule.where for rule in rules(["(bug)"])]
    assert len(listed) == len(PLANTED_BUGS)
    assert len(list(rules(["(bug)", "probe_rounds.py"]))) > 1


def test_scenarios_are_listed() -> None:
    assert [rule.where for rule in rules(["docs/scenarios/fatal-xid.txt"])]


def test_words_that_no_rule_has_find_none() -> None:
    assert not list(rules(["witness", "coffee"]))
