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
        [sys.executable, "-c", ORPHANED_WHILE_LISTED], capture_output=True, text=True, timeout=60, check=True
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
        (words,) = process_tree.describe_unkilled(process.pid)
        process.kill()
    assert re.fullmatch(rf"process {process.pid} \({shown}\) is in state [RSD](, in \w+)?", words)
    assert process_tree.describe_unkilled(process.pid) == []


CHILD_OF_A_SESSION = """
import ctypes, os, platform, signal, time
from muster.daemon.host import process_tree as process

process.adopt_orphans()
leader = os.fork()
if not leader:
    os.setsid()
    if not os.fork():
        os.setsid()
        clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
        ctypes.CDLL(None).syscall(clone, 0x4000 | signal.SIGCHLD, 0, 0, 0, 0)  # CLONE_VFORK: the parent waits in D
        time.sleep(100)
    os._exit(0)
os.waitid(os.P_PID, leader, os.WEXITED | os.WNOWAIT)
deadline = time.monotonic() + 20
while "state D" not in (words := process.describe_unkilled(leader))[0] and time.monotonic() < deadline:
    os.sched_yield()
(child,) = set(process.child_pids()) - {leader}
print(leader, child, words)
while process.kill_orphans(set()):
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
"""


def test_a_child_in_a_session_of_its_own_is_named_in_place_of_the_rank_that_has_ended() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CHILD_OF_A_SESSION], capture_output=True, text=True, timeout=60, check=True
    )
    leader, child, words = ran.stdout.split(maxsplit=2)
    assert leader not in words
    assert re.fullmatch(rf"\['process {child} \(python[\d.]*\) is in state D(, in \w+)?'\]\n", words)
