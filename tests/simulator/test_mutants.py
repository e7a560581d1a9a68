"""The simulator finds bugs: each planted bug is found within 200 seeds."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from muster.simulator.planted_bugs.mutants import MUTANTS, Mutant, mutate

SEEDS = 200


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    command = [sys.executable, "-Pm", "muster.simulator.planted_bugs.mutants", name, str(SEEDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "found by seed" in done.stdout


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_planted_bug_is_where_it_says(mutant: Mutant) -> None:
    spec = find_spec(mutant.module)
    assert spec is not None
    assert spec.origin is not None
    assert mutate(mutant, Path(spec.origin).read_text()).count(mutant.after) >= 1


def test_a_bug_that_has_no_place_is_refused() -> None:
    with pytest.raises(ValueError, match="0 times"):
        mutate(Mutant("", "module", "gone", "new"), "text")
