"""The bookkeeping of the commit leader."""

from hypothesis import given
from hypothesis import strategies as st

from muster.checkpoint.format.versions import NO_VERSION, Version
from muster.checkpoint.store.commit.commit_tracker import (
    HISTORY_VERSIONS,
    MISSES_TO_LENGTHEN,
    CommitDecision,
    CommitTracker,
)

NODES = ("a", "b", "c")


def new_tracker() -> CommitTracker:
    return CommitTracker(2, frozenset(NODES))


def version_at(step: int) -> Version:
    return Version(2, step)


def test_all_nodes_commit() -> None:
    tracker = new_tracker()
    assert tracker.record_stored("a", version_at(1), 0, {}) is None
    assert tracker.record_stored("a", version_at(1), 0, {}) is None
    assert tracker.record_stored("b", version_at(1), 0, {}) is None
    assert tracker.record_stored("c", version_at(1), 0, {}) == CommitDecision(version_at(1), False, 2, version_at(1))
    assert tracker.record_stored("c", version_at(1), 0, {}) is None, "each decision is made once"


def test_reports_of_other_nodes_and_generations_do_not_count() -> None:
    tracker = new_tracker()
    tracker.record_stored("a", version_at(1), 0, {})
    tracker.record_stored("b", version_at(1), 0, {})
    assert tracker.record_stored("stranger", version_at(1), 0, {}) is None
    assert tracker.record_stored("c", Version(1, 1), 0, {}) is None
    assert tracker.record_stored("c", Version(3, 1), 0, {}) is None
    assert tracker.committed == NO_VERSION


def test_a_skipped_version_is_void_for_good() -> None:
    tracker = new_tracker()
    tracker.record_stored("a", version_at(1), 0, {})
    assert tracker.record_skipped("b", version_at(1), 0) == CommitDecision(version_at(1), True, 2, NO_VERSION)
    assert tracker.record_skipped("c", version_at(1), 0) is None
    for node in NODES:
        assert tracker.record_stored(node, version_at(1), 0, {}) is None


def test_a_skip_makes_older_versions_void_that_are_not_committed() -> None:
    tracker = new_tracker()
    commit(tracker, 1, passed_step=1)
    tracker.record_stored("a", version_at(2), 2, {})
    tracker.record_stored("b", version_at(2), 2, {})
    assert tracker.record_skipped("c", version_at(3), 3) == CommitDecision(version_at(3), True, 4, version_at(1))
    assert tracker.record_stored("c", version_at(2), 3, {}) is None
    assert tracker.record_skipped("c", version_at(2), 3) is None
    assert tracker.committed == version_at(1)


def test_a_version_up_to_the_committed_one_can_not_become_void() -> None:
    tracker = new_tracker()
    for node in NODES:
        tracker.record_stored(node, version_at(5), 0, {})
    assert tracker.record_skipped("a", version_at(5), 0) is None
    assert tracker.record_skipped("a", version_at(4), 0) is None
    for node in NODES:
        assert tracker.record_stored(node, version_at(4), 0, {}) is None, "commits only move forward"


reports = st.lists(st.tuples(st.sampled_from(NODES), st.integers(1, 6), st.booleans()), max_size=60)


@given(reports)
def test_in_any_order_commits_move_forward_and_no_version_is_committed_and_void(
    reported: list[tuple[str, int, bool]],
) -> None:
    tracker = new_tracker()
    committed: list[Version] = []
    void: set[Version] = set()
    stored: dict[Version, set[str]] = {}
    named = 0
    for node, step, skip in reported:
        decision = (
            tracker.record_skipped(node, version_at(step), 0)
            if skip
            else tracker.record_stored(node, version_at(step), 0, {})
        )
        if not skip:
            stored.setdefault(version_at(step), set()).add(node)
        if decision is None:
            continue
        assert decision.next_step >= named, "the next step to keep never moves back"
        named = decision.next_step
        if decision.void:
            assert decision.version not in void
            assert not committed or decision.version > committed[-1]
            void.add(decision.version)
        else:
            assert stored[decision.version] == set(NODES)
            assert decision.version not in void
            assert not committed or decision.version > committed[-1]
            committed.append(decision.version)


def commit(tracker: CommitTracker, step: int, passed_step: int) -> int:
    for node in NODES:
        decision = tracker.record_stored(node, version_at(step), passed_step, {})
    assert decision is not None
    return decision.next_step


def test_the_next_step_to_keep_is_the_running_one() -> None:
    tracker = new_tracker()
    assert commit(tracker, 1, passed_step=1) == 2
    assert commit(tracker, 2, passed_step=5) == 6


def miss(tracker: CommitTracker, step: int) -> int:
    """Report a miss of `step`; returns the lead afterwards."""
    decision = tracker.record_skipped("c", version_at(step), passed_step=step)
    assert decision is not None
    return decision.next_step - step


def test_misses_lengthen_the_lead_and_commits_shorten_it() -> None:
    tracker, step = new_tracker(), 1
    leads = []
    for _ in range(12 * MISSES_TO_LENGTHEN):
        leads.append(miss(tracker, step))
        step = tracker.next_step
    assert leads[MISSES_TO_LENGTHEN - 1 :: MISSES_TO_LENGTHEN] == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024]
    leads = []
    for _ in range(40 * HISTORY_VERSIONS):
        step = tracker.next_step
        leads.append(commit(tracker, step, passed_step=step) - step)
    assert leads == sorted(leads, reverse=True)
    assert leads[-1] == 1


def test_a_miss_soon_after_a_shortening_restores_the_longer_lead() -> None:
    tracker, step = new_tracker(), 1
    for _ in range(2 * MISSES_TO_LENGTHEN):
        miss(tracker, step)
        step = tracker.next_step
    leads = []
    for _ in range(HISTORY_VERSIONS):
        leads.append(commit(tracker, step, passed_step=step) - step)
        step = tracker.next_step
    assert leads == [4] * (HISTORY_VERSIONS - 1) + [3]
    assert miss(tracker, step) == 4


def test_a_single_miss_among_commits_changes_nothing() -> None:
    tracker = new_tracker()
    step = 1
    for _ in range(3):
        for _ in range(HISTORY_VERSIONS // 2):
            assert commit(tracker, step, passed_step=step) == step + 1
            step += 1
        decision = tracker.record_skipped("c", version_at(step), passed_step=step)
        assert decision is not None
        assert decision.next_step == step + 1
        step += 1


def test_a_named_step_stays_named_until_it_is_decided() -> None:
    tracker = new_tracker()
    assert commit(tracker, 1, passed_step=10) == 11
    assert commit(tracker, 4, passed_step=10) == 11, "kept although another step was named"
    decision = tracker.record_skipped("a", version_at(11), passed_step=11)
    assert decision is not None
    assert decision.next_step == 12
