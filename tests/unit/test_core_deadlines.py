"""Deadlines: the nearest is right whatever was moved or dropped, and a gang is looked at only when one has come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muster.daemon.coordinator.core.deadlines import Deadlines
from muster.simulator.scenario import Scenario

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


def test_a_gang_that_waits_is_not_polled() -> None:
    """A rank outlives SIGKILL for eight seconds, so the fence is acknowledged late. Each round of probes of the two
    nodes in question (the stuck one, and the one that shall open the store) ends at a deadline; nothing else is due.
    """
    world = Scenario(nodes=4, spares=1)
    world.run_until(lambda: world.is_running(1))
    world.machines["n1"].ranks_unkillable_until = world.now + 9.0
    world.kill_rank("n2", delay_s=1.0)
    world.run_for(1.1)
    ticks = world.world.coverage.counts
    before = ticks["event", "Tick"]
    world.run_for(7.0)
    assert not world.is_running(2)
    assert ticks["event", "Tick"] - before < 7.0 / 0.2
    world.run_until(lambda: world.is_running(2))
