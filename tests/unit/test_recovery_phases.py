"""The phases of a recovery: how long each took, whatever is known of them."""

from __future__ import annotations

import pytest

from muster.recovery_phases import RecoveryPhase, phase_seconds

DETECT, FENCE, PLACE, RENDEZVOUS, LOAD, FIRST_STEP = RecoveryPhase


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((11, 12, 15, 18, 19, 23), {DETECT: 1, FENCE: 1, PLACE: 3, RENDEZVOUS: 3, LOAD: 1, FIRST_STEP: 4}),
        ((11, 12, 15, 18, 17, 23), {DETECT: 1, FENCE: 1, PLACE: 3, RENDEZVOUS: 3, LOAD: 0, FIRST_STEP: 5}),
        ((11, 12, 15, 0, 0, 23), {DETECT: 1, FENCE: 1, PLACE: 3, RENDEZVOUS: 0, LOAD: 0, FIRST_STEP: 8}),
        ((11, 12, 15, 18, 0, 0), {DETECT: 1, FENCE: 1, PLACE: 3, RENDEZVOUS: 3}),
        ((0, 0, 0, 0, 0, 0), {}),
    ],
)
def test_the_phases_that_are_over_add_up(ends: tuple[float, ...], expected: dict[RecoveryPhase, float]) -> None:
    found = dict(phase_seconds(10, ends))
    assert found == expected
    assert sum(found.values()) == max(*ends, 10) - 10


def test_a_phase_is_named_alike_by_people_and_programs() -> None:
    assert [(phase.value, phase.words) for phase in (LOAD, FIRST_STEP)] == [
        ("load", "load"),
        ("first_step", "first step"),
    ]
