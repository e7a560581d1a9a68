"""When ranks plan anew: all before the same snapshot, whichever of them has changed. With a store and threads."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.rank_store import Store

from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training.agreements import joint_planning
from muster.checkpoint.training.agreements.joint_planning import JointPlanning, RanksWithStore

RANKS, SNAPSHOTS = 3, 40


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(RANKS) as pool:
        yield pool


class LostStore(Store):
    """The process in which it is has ended."""

    def add(self, key: str, amount: int) -> int:
        raise _LOST

    def check(self, keys: list[str]) -> bool:
        raise _LOST

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        raise _LOST

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        raise _LOST


_LOST = RuntimeError("connection reset by peer")


def ranks_of(store: Store, world_size: int = RANKS, **times: float) -> list[JointPlanning]:
    ranks = []
    for number in range(RANKS):
        group = RanksWithStore(number, world_size, store)
        ranks.append(JointPlanning(lambda group=group: group, **times))  # type: ignore[misc]
        ranks[-1].begin()
    return ranks


@settings(max_examples=40)
@given(changes=st.lists(st.tuples(st.integers(1, SNAPSHOTS), st.integers(0, RANKS - 1)), max_size=8))
def test_all_ranks_plan_before_the_same_snapshot_and_no_change_is_forgotten(
    threads: ThreadPoolExecutor, changes: list[tuple[int, int]]
) -> None:
    store = Store()
    ranks, changed, waited = ranks_of(store), set[int](), 0
    for snapshot in range(1, SNAPSHOTS + 1):
        changed |= {rank for at, rank in changes if at == snapshot}
        last = snapshot == SNAPSHOTS

        def ask(number: int, changed: set[int] = changed, last: bool = last) -> bool:
            return ranks[number].is_due("weight" if number in changed else "", last=last)

        due = list(threads.map(ask, range(RANKS)))
        assert len(set(due)) == 1, f"snapshot {snapshot}: {due}"
        changed, waited = (set(), 0) if due[0] else (changed, waited + bool(changed))
        assert waited <= 2**joint_planning.MOST_DOUBLINGS
    assert not changed
    assert not store.timeouts


def test_a_change_costs_one_snapshot_and_no_change_one_question_each(threads: ThreadPoolExecutor) -> None:
    store = Store()
    ranks = ranks_of(store)

    def snapshot(change: str) -> list[bool]:
        return list(
            threads.map(lambda number: ranks[number].is_due(change if number == 1 else "", last=False), range(3))
        )

    for _ in range(20):
        assert snapshot("") == [False] * RANKS
    assert store.questions == 20 * RANKS
    assert snapshot("weight") == [False] * RANKS
    assert snapshot("weight") == [True] * RANKS
    assert snapshot("") == [False] * RANKS


def test_plans_in_a_row_are_put_together_until_there_are_none_for_a_while(threads: ThreadPoolExecutor) -> None:
    ranks = ranks_of(Store())

    def snapshot(change: str) -> bool:
        return all([*threads.map(lambda rank: rank.is_due(change, last=False), ranks)])

    planned = [number for number in range(1, 60) if snapshot("weight")]
    assert planned == [2, 4, 8, 16, 32, 48]
    assert [number for number in range(60, 260) if snapshot("")] == [64]
    assert [snapshot("weight"), snapshot("weight")] == [False, True]


def test_in_a_large_job_looks_are_further_apart() -> None:
    store = Store()
    rank = ranks_of(store, world_size=16_000)[0]
    assert not any(rank.is_due("", last=False) for _ in range(630))
    assert store.questions == 10


def test_ranks_that_do_not_come_are_an_error_that_names_what_has_changed() -> None:
    ranks = ranks_of(Store(), meeting_s=0.0)
    assert not ranks[1].is_due("experts.2.weight", last=False)
    assert not ranks[0].is_due("", last=False)
    for rank, change in ((ranks[1], "experts.2.weight"), (ranks[0], "")):  # the second comes when the first has gone
        with pytest.raises(CheckpointError, match=r"the first experts\.2\.weight of rank 1, and not all 3 ranks came"):
            rank.is_due(change, last=False)


def test_a_rank_that_does_not_come_to_the_last_snapshot_holds_nobody_up() -> None:
    ranks = ranks_of(Store(), last_meeting_s=0.0)
    assert [rank.is_due("weight", last=True) for rank in ranks] == [False] * RANKS


@pytest.mark.parametrize("last", [False, True])
def test_training_goes_on_without_the_store(*, last: bool) -> None:
    """Rank 0, in whose process the store is, may end first."""
    rank = ranks_of(LostStore())[1]
    assert not rank.is_due("", last=last)
    assert not rank.is_due("weight", last=last)


def test_a_rank_alone_plans_at_once() -> None:
    alone: Callable[[], RanksWithStore | None] = lambda: None  # noqa: E731
    rank = JointPlanning(alone)
    rank.begin()
    assert rank.is_due("weight", last=False)
    assert not rank.is_due("", last=True)
