"""Every state word of Slurm is read in all its spellings, and no word raises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.slurm.client.states import JobFlag, JobState, NodeState, job_states, node_states

# The words of data_parser v0.0.42 to v0.0.45, as the plugins of 26.05.5 hold them.
PARSER_NODE_WORDS = """
    UNKNOWN DOWN IDLE ALLOCATED ERROR MIXED FUTURE INVALID EXTERNAL RESERVED UNDRAIN CLOUD RESUME DRAIN
    COMPLETING NOT_RESPONDING POWERED_DOWN FAIL POWERING_UP MAINTENANCE REBOOT_REQUESTED REBOOT_CANCELED
    POWERING_DOWN DYNAMIC_FUTURE REBOOT_ISSUED PLANNED INVALID_REG POWER_DOWN POWER_UP POWER_DRAIN
    POWER_DOWN_ASAP POWER_DOWN_FORCE DYNAMIC_NORM BLOCKED
"""
PARSER_JOB_FLAGS = """
    LAUNCH_FAILED REQUEUED REQUEUE_HOLD SPECIAL_EXIT RESIZING CONFIGURING COMPLETING STOPPED RECONFIG_FAIL
    POWER_UP_NODE REVOKED REQUEUE_FED RESV_DEL_HOLD SIGNALING STAGE_OUT EXPEDITING
"""


@pytest.mark.parametrize("word", PARSER_NODE_WORDS.split())
def test_node_words_of_the_data_parser(word: str) -> None:
    assert node_states([word]) == (frozenset({NodeState[word]}), ())


@pytest.mark.parametrize("word", PARSER_JOB_FLAGS.split())
def test_job_flags_of_the_data_parser(word: str) -> None:
    assert job_states(["RUNNING", word]) == (JobState.RUNNING, frozenset({JobFlag[word]}), ())


@pytest.mark.parametrize(
    ("word", "states"),
    [
        ("IDLE+DRAIN+NOT_RESPONDING", {NodeState.IDLE, NodeState.DRAIN, NodeState.NOT_RESPONDING}),
        ("down*", {NodeState.DOWN, NodeState.NOT_RESPONDING}),
        ("idle~", {NodeState.IDLE, NodeState.POWERED_DOWN}),
        ("alloc#", {NodeState.ALLOCATED, NodeState.POWERING_UP}),
        ("maint", {NodeState.MAINTENANCE}),
        ("inval", {NodeState.INVALID_REG}),
        ("reboot^", {NodeState.REBOOT_ISSUED}),
        ("reboot", {NodeState.REBOOT_REQUESTED}),
        ("mix-", {NodeState.MIXED, NodeState.PLANNED}),
    ],
)
def test_other_spellings(word: str, states: set[NodeState]) -> None:
    assert node_states([word]) == (frozenset(states), ())


def test_unknown_words_are_kept_with_the_known_states() -> None:
    assert node_states(["DOWN", "Levitating"]) == (
        frozenset({NodeState.DOWN, NodeState.UNRECOGNISED}),
        ("Levitating",),
    )
    assert job_states(["RUNNING", "TELEPORTING"]) == (
        JobState.RUNNING,
        frozenset({JobFlag.UNRECOGNISED}),
        ("TELEPORTING",),
    )


def test_a_job_without_a_base_state_has_not_ended() -> None:
    state, flags, strange = job_states(["COMPLETING"])
    assert (state, flags, strange) == (JobState.UNRECOGNISED, frozenset({JobFlag.COMPLETING}), ())
    assert not state.ended


@given(st.lists(st.text()))
def test_no_text_raises(words: list[str]) -> None:
    node_states(words)
    job_states(words)
