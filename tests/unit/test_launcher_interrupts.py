"""Ctrl-C before a command has begun, and after that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PRESS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # as at a terminal: a shell's background job ignores ctrl-C
def press(event, arguments):
    if PLACE in (event, arguments[0] if event == "import" else ""):
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(press)
from muster.launcher.__main__ import program
program()
"""


def press_at(place: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs `muster`, and presses ctrl-C when it imports a module, or at an audit event of Python."""
    argv = [sys.executable, "-c", PRESS.replace("PLACE", repr(place)), *words]
    environ = {**os.environ, "MUSTER_COORDINATOR": "127.0.0.1:1", "TMPDIR": str(folder)}
    return subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("module", ["muster.launcher.command_table", "muster.launcher.submission.origin"])
def test_ctrl_c_during_the_imports_ends_the_command_without_a_word(module: str, tmp_path: Path) -> None:
    done = press_at(module, "submit", "job.toml", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_in_a_command_lets_it_end_well(tmp_path: Path) -> None:
    done = press_at("muster.launcher.spec.spec", "submit", "job.toml", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_local_run_that_is_interrupted_before_it_starts_leaves_nothing(tmp_path: Path) -> None:
    words = ("run", "--local", "--", "true")
    done = press_at("tempfile.mkdtemp", *words, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert list(tmp_path.glob("muster-local-*")) == []
