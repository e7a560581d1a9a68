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
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from muster.launcher.program import program
program()
"""


def press_while_importing(module: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs `muster`, and presses ctrl-C while it looks for a module."""
    argv = [sys.executable, "-c", PRESS.replace("MODULE", repr(module)), *words]
    environ = {**os.environ, "MUSTER_COORDINATOR": "127.0.0.1:1"}
    return subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("module", ["muster.launcher.command_table", "muster.launcher.commands.submit"])
def test_ctrl_c_during_the_imports_ends_the_command_without_a_word(module: str, tmp_path: Path) -> None:
    done = press_while_importing(module, "submit", "job.toml", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_in_a_command_lets_it_end_well(tmp_path: Path) -> None:
    done = press_while_importing("muster.launcher.spec.spec", "submit", "job.toml", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
