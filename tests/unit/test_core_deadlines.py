"""Deadlines: the nearest is right whatever was moved or dropped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muster.daemon.coordinator.core.deadlines import Deadlines

MOMENTS = st.floats(0, 10, allow_nan=False)
MOVES = st.lists(st.tuples(st.sampled_from("abcd"), st.none() | MOMENTS))


@given(MOVES, MOMENTS)
def test_deadlines_behave_as_a_dictionary_that_knows_its_nearest(
    moves: list[tuple[str, float | None]], now: float
) -> None:
    deadlines, plain = Deadlines(), dict[str, float]()
    for key, at in moves:
        deadlines.set(key, at)
        plain.pop(key, None)
        if at is not None:
            plain[key] = at
        assert deadlines.nearest == min(plain.values(), default=None)
        assert deadlines.get(key) == plain.get(key)
    due = [key for key, at in plain.items() if at <= now]
    taken = deadlines.pop_due(now)
    assert sorted(taken) == sorted(due)
    assert [plain[key] for key in taken] == sorted(plain[key] for key in due)
    assert deadlines.nearest == min((at for at in plain.values() if at > now), default=None)
