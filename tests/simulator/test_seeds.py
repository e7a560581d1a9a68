"""Two thousand simulated runs full of faults: no invariant is violated, and everything that can happen happens."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from muster.simulator import parallel, seeds

SEEDS = 2000
EVENTS, FAULTS = 400, 3
"""On average, a seed."""
MIN_COUNT = 25
"""Every transition of the state tables and every kind of recovery occurs at least this often. The rarest ones occur 37
to 50 times: a change of the worlds moves that by some, and one that takes a kind out of reach moves it much further."""
RARE = {"straggler found": 12, "straggler lasts": 3}
"""What occurs less often (25 and 9 times): a rank is named once it was slow for 72 steps. Most runs last no longer."""


def test_no_invariant_is_violated_and_everything_happens(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = parallel.run(0, SEEDS)
    with capsys.disabled():
        print("", *outcome.report(), sep="\n")
    assert not outcome.failures
    assert outcome.coverage.total("event") >= EVENTS * SEEDS
    assert outcome.coverage.total("fault") >= FAULTS * SEEDS
    too_rare = {name: number for _, name, number in outcome.coverage.required() if number < RARE.get(name, MIN_COUNT)}
    assert too_rare == {}


SHOW = """
import sys
from muster.simulator.__main__ import main
for seed in sys.argv[1:]:
    sys.argv[1:] = ["--seed", seed]
    assert main() == 0
    print(end="\f")
"""


def test_one_seed_is_one_run() -> None:
    """The order of a set of strings differs between processes. No run may depend on it, or on a run before it in the
    same process: each is the first once."""
    with ThreadPoolExecutor() as pool:
        first, *others = pool.map(_transcripts, ("1", "2", "3"), (["6", "8", "42"], ["8", "42", "6"], ["42", "6", "8"]))
    assert [other == first for other in others] == [True, True]
    assert all(len(transcript.splitlines()) > 100 for transcript in first.values())


def _transcripts(hash_seed: str, seeds_in_order: list[str]) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", SHOW, *seeds_in_order],
        env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(zip(seeds_in_order, done.stdout.split("\f")[:-1], strict=True))


def test_a_traced_seed_has_a_transcript() -> None:
    result = seeds.run(3)
    assert result.violation == ""
    assert result.transcript == []
    traced = seeds.run(3, trace=True)
    assert any("FAULT" in line for line in traced.transcript)
    assert traced.coverage.counts == result.coverage.counts
