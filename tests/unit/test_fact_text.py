"""The words for `GenerationFenced`. This fact begins a preflight, or it ends a generation after a fault."""

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.fact_text import describe


def test_the_preflight_of_a_requeued_run_is_not_called_a_fenced_generation() -> None:
    first = facts.GenerationFenced("job1", 0, facts.PREFLIGHT_CAUSE, True, "n0", 0, 1.0)
    requeued = facts.GenerationFenced("job1", 3, facts.PREFLIGHT_CAUSE, True, "n0", 0, 9.0)
    assert describe(first) == "preflight: the agent on n0 opens the rendezvous store: start"
    assert describe(requeued) == describe(first)


def test_a_fault_fences_its_generation() -> None:
    fenced = facts.GenerationFenced("job1", 3, "n1 is lost", True, "n0", 40, 9.0)
    assert describe(fenced) == "generation 3 is fenced at step 40, and its ranks are ended: n1 is lost"


def test_a_generation_whose_ranks_have_said_nothing_is_not_at_step_0() -> None:
    fenced = facts.GenerationFenced("job1", 3, "n1 is lost", True, "n0", 0, 9.0)
    words = "generation 3 is fenced before its ranks have reported a step, and its ranks are ended: n1 is lost"
    assert describe(fenced) == words
