"""The watchdog of the test run says which tests are slow, and fails none."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = Path(__file__).resolve().parents[1] / "conftest.py"
TESTS = """
import time

def test_slow():
    time.sleep({slow_s})

def test_quick():
    pass
"""


def run(folder: Path, slow_s: float, *options: str) -> str:
    """What pytest prints of two tests that pass."""
    shutil.copy(PLUGIN, folder / "conftest.py")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:asyncio -p no:hypothesispytest\n")
    (folder / "test_two.py").write_text(TESTS.format(slow_s=slow_s))
    command = [sys.executable, "-Im", "pytest", "-p", "no:cacheprovider", *options, str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    return done.stdout


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_the_slowest_running_test_is_named_once_the_budget_is_exceeded(tmp_path: Path, workers: tuple[str]) -> None:
    said = run(tmp_path, 2.0, "--budget", "0.2", *workers)
    warned = [line for line in said.splitlines() if line.startswith("watchdog: ")]
    assert [line for line in warned if line.endswith("test_two.py::test_slow")], said
    slowest = said.partition("slowest 10 tests")[2].splitlines()
    assert slowest[1].endswith("test_two.py::test_slow")
    assert slowest[2].endswith("test_two.py::test_quick")


def test_a_run_within_its_budget_is_not_warned_of(tmp_path: Path) -> None:
    assert "watchdog: " not in run(tmp_path, 0.0, "--budget", "1000")


def test_without_a_budget_nothing_is_said(tmp_path: Path) -> None:
    assert "slowest" not in run(tmp_path, 0.0)
