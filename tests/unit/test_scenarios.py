"""Scenarios without chance. Those of docs/scenarios are documents, and must match word for word. Those of `scenarios`
hold which facts are decided, in which order and about which node, and how the scenario ends.

MUSTER_GOLDEN=write writes what happens now; read the diff.
"""

import os
from pathlib import Path

import pytest

from muster.simulator.script import InvalidScript, play

DOCUMENTS = Path(__file__).parents[2] / "docs" / "scenarios"
SCENARIOS = Path(__file__).parent / "scenarios"


@pytest.mark.parametrize(
    "path", sorted([*DOCUMENTS.glob("*.txt"), *SCENARIOS.glob("*.txt")]), ids=lambda path: path.stem
)
def test_a_scenario_goes_as_it_is_told(path: Path) -> None:
    played = play(path.read_text(), facts_alone=path.parent == SCENARIOS)
    if os.environ.get("MUSTER_GOLDEN") == "write":
        path.write_text(played)
    assert played == path.read_text()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("> until step 3", "the first command creates the gang"),
        ("> gang nodes=2 spares=0\n> explode n1", "'explode n1': unknown command"),
        ("> gang nodes=2", "missing 1 required positional argument: 'spares'"),
        ("> gang nodes=2 spares=0\n> until FINISHED", "'until FINISHED'"),
        ("> gang nodes=2 spares=0\n> crash n7", "'crash n7'"),
    ],
)
def test_a_command_that_can_not_be_right_is_named(script: str, words: str) -> None:
    with pytest.raises(InvalidScript, match=words):
        play(script)
