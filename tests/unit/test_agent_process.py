"""Ending whole trees of processes, in an interpreter of its own: it adopts what the ended leave behind."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from muster.daemon.host import process_tree

ORPHANED_WHILE_LISTED = """
import os, signal, subprocess, sys
from muster.daemon.host import process_tree as process

process.adopt_orphans()
family = "import subprocess, time; print(subprocess.Popen(['sleep', '100']).pid, flush=True); time.sleep(100)"
parent = subprocess.Popen([sys.executable, "-c", family], stdout=subprocess.PIPE)
parent.stdout.readline()
early = process.child_pids()
parent.kill()
os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
lists = [process.child_pids, lambda: early]
left = process.kill_orphans(set(), lambda: (lists.pop() if len(lists) > 1 else lists[0])())
print(left, len(process.child_pids()))
while process.kill_orphans(set()):
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
"""


def test_orphans_that_came_after_the_children_were_listed_are_counted() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ORPHANED_WHILE_LISTED], capture_output=True, text=True, timeout=30, check=True
    )
    left, there = map(int, ran.stdout.split())
    assert left == there


@pytest.mark.parametrize(("name", "shown"), [("train", "train"), ("\u0436" * 8, "\u0436" * 7 + "\ufffd")])
def test_a_process_of_a_group_is_named_with_its_state_until_it_is_gone(tmp_path: Path, name: str, shown: str) -> None:
    """The kernel keeps 15 bytes of its name, though a letter has several."""
    (tmp_path / name).write_text("#!/bin/sh\necho; read _\n")
    (tmp_path / name).chmod(0o755)
    pipe = subprocess.PIPE
    with subprocess.Popen([tmp_path / name], stdin=pipe, stdout=pipe, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (words,) = process_tree.describe_group(process.pid)
        process.kill()
    assert re.fullmatch(rf"process {process.pid} \({shown}\) is in state [RSD](, in \w+)?", words)
    assert process_tree.describe_group(process.pid) == []
