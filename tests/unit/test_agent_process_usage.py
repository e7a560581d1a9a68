"""CPU time and bytes of whole process trees, from a made folder in the place of /proc, and from real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.daemon.agent.ranks.process_usage import TreeUsage, read_usage

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def add(proc: Path, pid: int, parent: int, *, name: str = "python3", state: str = "S", ticks: str = "0 0 0 0") -> Path:
    """A process: its times are utime, stime, cutime, cstime, as in proc(5)."""
    folder = proc / str(pid)
    folder.mkdir()
    (folder / "stat").write_bytes(f"{pid} ({name}) {state} {parent} 1 1 0 -1 0 9 9 9 9 {ticks} 20 0 1 0 5\n".encode())
    return folder


def test_a_tree_has_the_time_and_the_bytes_of_all_its_processes(tmp_path: Path) -> None:
    rank = add(tmp_path, 10, 1, ticks=f"{TICKS_PER_S} 0 {2 * TICKS_PER_S} 0")
    (rank / "io").write_text("rchar: 100\nwchar: 20\nsyscr: 7\nread_bytes: 3\nwrite_bytes: 0\ncancelled_write_bytes: 9")
    (add(tmp_path, 11, 10, name="a) b (", ticks=f"0 {TICKS_PER_S} 0 0") / "io").write_text("rchar: 5\n")
    add(tmp_path, 12, 11)
    add(tmp_path, 20, 1, ticks="900 0 0 0")
    (tmp_path / "self").mkdir()
    assert read_usage([10, 20, 99], tmp_path) == {
        10: TreeUsage(4.0, 128, frozenset({10, 11, 12})),
        20: TreeUsage(900 / TICKS_PER_S, 0, frozenset({20})),
    }


@pytest.mark.parametrize(("state", "at_work"), [("S", False), ("R", True), ("D", True), ("T", False), ("Z", False)])
def test_a_process_that_waits_for_a_processor_or_a_disk_is_at_work(tmp_path: Path, state: str, at_work: bool) -> None:
    add(tmp_path, 10, 1)
    add(tmp_path, 11, 10, state=state)
    assert read_usage([10], tmp_path)[10].at_work is at_work


def test_a_process_that_ends_meanwhile_is_left_out(tmp_path: Path) -> None:
    add(tmp_path, 10, 1)
    (tmp_path / "11").mkdir()  # its files are gone already
    assert read_usage([10, 11], tmp_path) == {10: TreeUsage(0.0, 0, frozenset({10}))}


def test_a_name_that_is_no_text_hides_no_process(tmp_path: Path) -> None:
    folder = add(tmp_path, 10, 1)
    (folder / "stat").write_bytes(b"10 (\xff\xfe) S 1 1 1 0 -1 0 9 9 9 9 0 0 0 0 20 0 1 0 5\n")
    assert 10 in read_usage([10], tmp_path)


def test_a_real_child_that_writes_is_counted_and_one_that_waits_changes_nothing() -> None:
    code = "import sys\nfor line in sys.stdin:\n    print(line, end='', flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        before = _usage_after(child, b"first\n")
        assert read_usage([child.pid])[child.pid].io_bytes == before.io_bytes
        after = _usage_after(child, b"second line\n")
        assert after.io_bytes - before.io_bytes >= 2 * len("second line\n")
        assert child.pid in read_usage([os.getpid()])[os.getpid()].pids
        assert child.stdin
        child.stdin.close()


def _usage_after(child: subprocess.Popen[bytes], line: bytes) -> TreeUsage:
    """The usage of the child once it has read a line, written it, and waits for the next one."""
    assert child.stdin
    assert child.stdout
    child.stdin.write(line)
    child.stdin.flush()
    assert child.stdout.readline() == line
    while (usage := read_usage([child.pid])[child.pid]).at_work:
        pass
    return usage
