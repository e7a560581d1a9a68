"""The leader's count: pure."""

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


def ballot() -> CommitTracker:
    return CommitTracker(2, frozenset(NODES))


def at(step: int) -> Version:
    return Version(2, step)


def test_all_nodes_commit() -> None:
    b = ballot()
    assert b.stored("a", at(1), 0) is None
    assert b.stored("a", at(1), 0) is None
    assert b.stored("b", at(1), 0) is None
    assert b.stored("c", at(1), 0) == CommitDecision(at(1), False, 2, at(1))
    assert b.stored("c", at(1), 0) is None, "said once"


def test_strangers_and_other_generations_do_not_count() -> None:
    b = ballot()
    b.stored("a", at(1), 0)
    b.stored("b", at(1), 0)
    assert b.stored("stranger", at(1), 0) is None
    assert b.stored("c", Version(1, 1), 0) is None
    assert b.stored("c", Version(3, 1), 0) is None
    assert b.committed == NO_VERSION


def test_a_skip_voids_once_and_for_good() -> None:
    b = ballot()
    b.stored("a", at(1), 0)
    assert b.skipped("b", at(1), 0) == CommitDecision(at(1), True, 2, NO_VERSION)
    assert b.skipped("c", at(1), 0) is None
    for node in NODES:
        assert b.stored(node, at(1), 0) is None


def test_a_skip_voids_what_is_older_and_not_committed() -> None:
    b = ballot()
    commit(b, 1, now=1)
    b.stored("a", at(2), 2)
    b.stored("b", at(2), 2)
    assert b.skipped("c", at(3), 3) == CommitDecision(at(3), True, 4, at(1))
    assert b.stored("c", at(2), 3) is None
    assert b.skipped("c", at(2), 3) is None
    assert b.committed == at(1)


def test_what_is_committed_or_older_can_not_be_voided() -> None:
    b = ballot()
    for node in NODES:
        b.stored(node, at(5), 0)
    assert b.skipped("a", at(5), 0) is None
    assert b.skipped("a", at(4), 0) is None
    for node in NODES:
        assert b.stored(node, at(4), 0) is None, "commits only move forward"


reports = st.lists(st.tuples(st.sampled_from(NODES), st.integers(1, 6), st.booleans()), max_size=60)


@given(reports)
def test_in_any_order_commits_grow_and_no_version_is_both(said: list[tuple[str, int, bool]]) -> None:
    b = ballot()
    committed: list[Version] = []
    void: set[Version] = set()
    stored: dict[Version, set[str]] = {}
    named = 0
    for node, step, skip in said:
        verdict = b.skipped(node, at(step), 0) if skip else b.stored(node, at(step), 0)
        if not skip:
            stored.setdefault(at(step), set()).add(node)
        if verdict is None:
            continue
        assert verdict.next_step >= named, "the step to keep next never moves back"
        named = verdict.next_step
        if verdict.void:
            assert verdict.version not in void
            assert not committed or verdict.version > committed[-1]
            void.add(verdict.version)
        else:
            assert stored[verdict.version] == set(NODES)
            assert verdict.version not in void
            assert not committed or verdict.version > committed[-1]
            committed.append(verdict.version)


def commit(b: CommitTracker, step: int, now: int) -> int:
    for node in NODES:
        verdict = b.stored(node, at(step), now)
    assert verdict is not None
    return verdict.next_step


def test_the_step_to_keep_next_is_the_one_under_way() -> None:
    b = ballot()
    assert commit(b, 1, now=1) == 2
    assert commit(b, 2, now=5) == 6


def miss(b: CommitTracker, step: int) -> int:
    """The lead that a miss of `step` leads to."""
    verdict = b.skipped("c", at(step), now=step)
    assert verdict is not None
    return verdict.next_step - step


def test_misses_make_the_lead_longer_and_calm_makes_it_shorter() -> None:
    b, step = ballot(), 1
    leads = []
    for _ in range(12 * MISSES_TO_LENGTHEN):
        leads.append(miss(b, step))
        step = b.next_step
    assert leads[MISSES_TO_LENGTHEN - 1 :: MISSES_TO_LENGTHEN] == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024]
    leads = []
    for _ in range(40 * HISTORY_VERSIONS):
        step = b.next_step
        leads.append(commit(b, step, now=step) - step)
    assert leads == sorted(leads, reverse=True)
    assert leads[-1] == 1


def test_a_miss_soon_after_the_lead_was_made_shorter_takes_that_back() -> None:
    b, step = ballot(), 1
    for _ in range(2 * MISSES_TO_LENGTHEN):
        miss(b, step)
        step = b.next_step
    leads = []
    for _ in range(HISTORY_VERSIONS):
        leads.append(commit(b, step, now=step) - step)
        step = b.next_step
    assert leads == [4] * (HISTORY_VERSIONS - 1) + [3]
    assert miss(b, step) == 4


def test_a_single_miss_among_commits_changes_nothing() -> None:
    b = ballot()
    step = 1
    for _ in range(3):
        for _ in range(HISTORY_VERSIONS // 2):
            assert commit(b, step, now=step) == step + 1
            step += 1
        verdict = b.skipped("c", at(step), now=step)
        assert verdict is not None
        assert verdict.next_step == step + 1
        step += 1


def test_a_step_that_is_named_stays_named_until_it_is_settled() -> None:
    b = ballot()
    assert commit(b, 1, now=10) == 11
    assert commit(b, 4, now=10) == 11, "kept out of turn"
    verdict = b.skipped("a", at(11), now=11)
    assert verdict is not None
    assert verdict.next_step == 12
