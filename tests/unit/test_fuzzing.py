"""The fuzzers: the kept inputs pass, and so do inputs near them; each target finds the bug that is planted for it.

`make fuzz` searches longer, with coverage.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from muster.daemon.transport.authority_table import AUTHORITY
from muster.simulator.planted_bugs.planting import PlantedBug

ROOT = Path(__file__).resolve().parents[2]
NEAR = 10
"""Inputs near the corpus of each target, enough for a few seconds in all."""
NEAR_BUG = 60
"""Inputs within which a planted bug is found."""


def _load(name: str) -> ModuleType:
    """A module of fuzzing/, which is no part of the distribution."""
    sys.path.insert(0, str(ROOT))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT))


CATALOGUE = _load("fuzzing.catalogue")
TARGETS: dict[str, str] = CATALOGUE.TARGETS
COMMAND = _load("fuzzing.__main__")
PLANTED_BUGS: dict[str, PlantedBug] = _load("fuzzing.planted_bugs").PLANTED_BUGS


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fuzzing", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_kept_inputs_and_inputs_near_them_pass() -> None:
    done = _run("--near-corpus", str(NEAR))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == list(TARGETS)


@pytest.mark.parametrize("name", CATALOGUE.SERVERS)
def test_a_bug_planted_in_a_server_is_found(name: str) -> None:
    """In a process of its own: its servers end with it."""
    done = _run("--target", name, "--planted", "--near-corpus", str(NEAR_BUG))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "found: " in done.stdout


@pytest.mark.parametrize("name", CATALOGUE.PARSERS)
def test_a_bug_planted_in_a_parser_is_found(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMAND.main(["--target", name, "--planted", "--near-corpus", str(NEAR_BUG)]) == 0
    assert "found: " in capsys.readouterr().out


def test_a_kept_input_can_be_run_alone(tmp_path: Path) -> None:
    hostile = tmp_path / "input"
    hostile.write_bytes(b"n[0-99999999]\xff")
    done = _run("--target", "slurm_text", "--input", str(hostile))
    assert done.returncode == 0, done.stderr
    assert "passes" in done.stdout
    assert _run("--target", "slurm_text", "--input", str(hostile), "--planted").returncode == 1


def test_every_target_has_its_corpus_and_its_bug() -> None:
    corpus = ROOT / "fuzzing" / "corpus"
    assert {path.name for path in corpus.iterdir()} == TARGETS.keys() == PLANTED_BUGS.keys()
    assert all(len(list((corpus / name).iterdir())) >= 3 for name in TARGETS)


def test_the_kept_calls_reach_every_method() -> None:
    """They name a method by its place: a method that came between others once left agents and node daemons out."""
    calls = _load("fuzzing.servers.calls")
    reached: set[str] = set()
    for name in ("coordinator_server", "node_servers"):
        module = _load(f"fuzzing.servers.{name}")
        for file in (ROOT / "fuzzing" / "corpus" / name).iterdir():
            found = calls.calls_of(file.read_bytes(), module.METHODS, len(module.CALLERS))
            reached |= {call.method for call in found if module.CALLERS[call.caller] is not None}
    assert reached == {method for method in AUTHORITY if method.startswith("/muster.v1.")}
