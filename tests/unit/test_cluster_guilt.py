"""Who may be drained in `make chaos`, and for how long."""

from muster.slurm.cluster.struck_nodes import FORGIVEN_S, Guilt

CALM: set[str] = {"n0", "n1"}


def test_a_node_that_was_never_struck_may_not_be_drained() -> None:
    assert "n0" not in Guilt()


def test_who_was_struck_is_let_off_once_nothing_was_held_against_it_for_long_enough() -> None:
    guilt = Guilt()
    guilt.strike("n0", 100.0)
    assert guilt.look(CALM, 99.0 + FORGIVEN_S) == []
    assert "n0" in guilt
    assert guilt.look(CALM, 100.0 + FORGIVEN_S) == ["n0"]
    assert "n0" not in guilt
    assert guilt.look(CALM, 200.0 + FORGIVEN_S) == []


def test_the_time_begins_anew_whenever_something_is_held_against_it() -> None:
    guilt = Guilt()
    guilt.strike("n0", 100.0)
    assert guilt.look({"n1"}, 150.0) == []
    assert guilt.look(CALM, 149.0 + FORGIVEN_S) == []
    guilt.strike("n0", 170.0)
    assert guilt.look(CALM, 169.0 + FORGIVEN_S) == []
    assert guilt.look(CALM, 170.0 + FORGIVEN_S) == ["n0"]
