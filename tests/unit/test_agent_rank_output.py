"""What ranks write reaches the output of their job's script: whole lines in order, and all of them."""

import fcntl
import json
import os
import tty
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from muster.daemon.agent.launch import rank_failure
from muster.daemon.agent.launch.handover import Shown
from muster.daemon.agent.launch.output_target import OutputTarget
from muster.daemon.agent.launch.rank_output import CHUNK_BYTES, RankOutput
from muster.daemon.agent.ranks.rank_process import Outcome
from muster.daemon.host import rank_log_files
from muster.daemon.testing.scripted_gang import Gang, scripted_gang
from muster.v1.agent_pb2 import DUTY_EXIT, RANK_PHASE_EXITED, Order
from muster.v1.common_pb2 import JobSpec

RANK = Outcome(rank=3, local_rank=1, generation=2, alive=True, pid=77, exit_code=0, failed=False)
ENDED = replace(RANK, alive=False)


class Copy:
    """The output of rank 3 and its neighbours in a scratch folder, copied step by step."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._seen = folder, 0
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        self.output = self.output_to(os.open(self._stdout, os.O_CREAT | os.O_WRONLY))

    def output_to(self, stdout: int, marks: tuple[str, ...] = ()) -> RankOutput:
        """The output of a node with two ranks."""
        stderr = os.open(self._stderr, os.O_CREAT | os.O_WRONLY)
        target = OutputTarget(JobSpec(ranks_per_node=2), "n0", Shown(marks=marks), stdout, stderr)
        return RankOutput(str(self._folder), "g", "n0", target)

    @property
    def written(self) -> bytes:
        """What was written to stdout since the last call of `all`."""
        return self._stdout.read_bytes()[self._seen :]

    @property
    def told(self) -> str:
        """What was written to stderr."""
        return self._stderr.read_text()

    def log(self, text: bytes, rank: int = 3, generation: int = 2) -> None:
        """The rank writes."""
        descriptor = rank_log_files.open_log(str(self._folder), "g", generation, rank)
        os.write(descriptor, text)
        os.close(descriptor)

    def all(self) -> bytes:
        """What is written once nothing is left to copy; since the last time."""
        while self.output.copy_once():
            pass
        written = self.written
        self._seen += len(written)
        return written


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Copy]:
    copy = Copy(tmp_path)
    yield copy
    copy.output.copy_rest()


def test_lines_are_copied_whole_and_in_order_and_the_last_one_at_the_end(copy: Copy) -> None:
    copy.output.note([RANK])
    assert copy.all() == b""  # no log yet
    copy.log(b"one\ntw")
    assert copy.all() == b"one\n"
    copy.log(b"o\n\xff\r3")
    assert copy.all() == b"two\n"
    copy.log(b"!")
    copy.output.note([ENDED])
    assert copy.all() == b"\xff\r3!\n"
    assert copy.told == ""


def test_each_line_has_the_mark_that_its_launcher_asks_for(copy: Copy, tmp_path: Path) -> None:
    marked = copy.output_to(os.open(tmp_path / "stdout", os.O_WRONLY), ("", "[eval1/${rank}/${hostname}]: "))
    copy.log(b"one\ntwo\n")
    copy.log(b"plain\n", rank=2)
    marked.note([ENDED, replace(ENDED, rank=2, local_rank=0)])
    marked.copy_rest()
    assert copy.written == b"plain\n[eval1/3/n0]: one\n[eval1/3/n0]: two\n"


def test_on_a_terminal_each_line_has_the_number_of_its_rank_in_a_colour_of_its_own(copy: Copy) -> None:
    screen, terminal = os.openpty()
    tty.setraw(terminal)
    shown, marked = copy.output_to(terminal), copy.output_to(terminal, ("[a]:", "[b]:"))
    copy.log(b"one\ntwo\n")
    copy.log(b"other\n", rank=2)
    for output in (shown, marked):
        output.note([ENDED, replace(ENDED, rank=2, local_rank=0)])
        output.copy_rest()
    two, three = b"\x1b[33m[2]\x1b[0m ", b"\x1b[34m[3]\x1b[0m "
    coloured = two + b"other\n" + three + b"one\n" + three + b"two\n"
    expected, seen = coloured + b"[a]:other\n[b]:one\n[b]:two\n", b""
    while len(seen) < len(expected):  # a terminal passes on what it has by now
        seen += os.read(screen, 4096)
    assert seen == expected
    for descriptor in (screen, terminal):
        os.close(descriptor)


def test_what_is_more_than_memory_shall_hold_comes_in_parts(copy: Copy) -> None:
    text = b"".join(b"%07d\n" % number for number in range(3 * CHUNK_BYTES // 8 + 100))
    copy.log(text)
    copy.output.note([RANK])
    assert copy.output.copy_once()
    assert len(copy.written) <= CHUNK_BYTES
    assert copy.written.endswith(b"\n")
    assert copy.all() == text


def test_a_line_without_end_is_split_where_memory_ends(copy: Copy) -> None:
    copy.log(b"x" * (CHUNK_BYTES + 10))
    copy.output.note([RANK])
    assert copy.all() == b"x" * CHUNK_BYTES
    copy.log(b"\n")
    assert copy.all() == b"x" * 10 + b"\n"


def test_each_rank_and_each_generation_is_copied_once(copy: Copy) -> None:
    copy.log(b"old", generation=1)
    copy.output.note([replace(RANK, generation=1)])
    assert copy.all() == b""
    copy.log(b"new\n")
    copy.log(b"other\n", rank=4)
    copy.output.note([RANK, replace(RANK, rank=4)])  # nobody has said that the old one has ended
    assert copy.all() == b"old\nnew\nother\n"
    copy.output.note([ENDED, replace(ENDED, rank=4)])
    copy.output.note([ENDED, replace(ENDED, rank=4)])
    assert copy.all() == b""


def test_an_output_that_nobody_reads_any_more_ends_the_copy_and_is_said_once(copy: Copy) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    output = copy.output_to(writer)
    output.note([RANK, replace(RANK, rank=4)])
    for number in range(2):
        copy.log(b"line\n", rank=3 + number)
        output.copy_rest()
    assert copy.told == "muster-agent: the output of ranks goes to their logs alone: stdout: Broken pipe\n"


def test_a_reader_who_stops_keeps_nobody_but_the_copy_waiting(copy: Copy) -> None:
    reader, writer = os.pipe()
    size = fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
    os.write(writer, b"." * size)  # the next write has to wait
    output = copy.output_to(writer)
    copy.log(b"one\n")
    output.note([RANK])
    output.start()
    copy.log(b"two\n")  # the rank is not held up, and neither is who notes its end
    output.note([ENDED])
    assert os.read(reader, size) == b"." * size
    output.close()
    assert os.read(reader, size) == b"one\ntwo\n"


def test_a_slow_reader_gets_all_that_is_left(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    size, join = fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ), Thread.join
    text, seen = b"".join(b"%07d\n" % number for number in range(2 * CHUNK_BYTES // 8)), bytearray()

    def slow_join(thread: Thread, _: float) -> None:
        """What is read until the patience of `close` ends: less than what is copied in one turn."""
        end = len(seen) + 3 * size
        while thread.is_alive() and len(seen) < end:
            try:
                seen.extend(os.read(reader, size))
            except BlockingIOError:
                join(thread, 0.01)

    monkeypatch.setattr(Thread, "join", slow_join)
    output = copy.output_to(writer)
    copy.log(text)
    output.note([ENDED])
    output.start()
    output.close()
    os.close(writer)
    assert not caplog.text
    assert bytes(seen) + os.read(reader, size) == text


def test_the_first_failure_of_a_generation_is_told_as_torchrun_tells_it(copy: Copy, tmp_path: Path) -> None:
    copy.log(b"before\n")
    failed = replace(ENDED, exit_code=7, failed=True)
    error = {"message": {"message": "ValueError: no", "extraInfo": {"py_callstack": "Traceback:\n  line 1\n"}}}
    rank_log_files.error_path(str(tmp_path), "g", 2, 3).write_text(json.dumps(error))
    copy.output.note([failed, replace(failed, rank=4)])
    assert copy.all() == b"before\n"
    assert copy.told.count("Root Cause") == 1
    file = rank_log_files.error_path(str(tmp_path), "g", 2, 3)
    where = f"  host      : n0\n  rank      : 3 (local_rank: 1)\n  exitcode  : 7 (pid: 77) \n  error_file: {file}\n"
    assert "\nRoot Cause (first observed failure):\n[0]:\n" in copy.told
    assert where in copy.told
    assert "  traceback : Traceback:\n    line 1\n" in copy.told


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (replace(ENDED, exit_code=-11, failed=True), "Signal 11 (SIGSEGV) received by PID 77"),
        (replace(ENDED, exit_code=-40, failed=True), "Signal 40 (real-time signal 40) received by PID 77"),
        (replace(ENDED, exit_code=1, failed=True), "in the output above; torch.distributed.elastic"),
    ],
)
def test_a_rank_that_has_recorded_nothing(outcome: Outcome, words: str) -> None:
    assert f"traceback : {words}" in rank_failure.describe(outcome, "n0", "")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"message": {}}', '{"message": {"extraInfo": 3}}'])
def test_a_record_that_is_none_counts_as_none(tmp_path: Path, copy: Copy, text: str) -> None:
    copy.log(b"")
    rank_log_files.error_path(str(tmp_path), "g", 2, 3).write_text(text)
    assert rank_failure.recorded_error(str(tmp_path), "g", ENDED) == ""


@pytest.fixture
async def gang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gang]:
    (tmp_path / "environment").write_bytes(b"PATH=/bin:/usr/bin\0")
    monkeypatch.setenv("MUSTER_RANK_ENVIRONMENT", str(tmp_path / "environment"))
    async with scripted_gang(tmp_path) as found:
        yield found


async def test_an_agent_copies_all_that_its_rank_writes_until_it_has_failed(gang: Gang) -> None:
    fails = """
        import json, os, sys
        for number in range(200_000):
            print(number)
        json.dump({"message": "it was " + "meant"}, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
        print("to stderr", file=sys.stderr)
        sys.stdout.write("no line end")
        sys.exit(5)
    """
    await gang.start(1, "/usr/bin/env", "python3", gang.script(fails))
    gang.fence(0)
    await gang.until(lambda: gang.status("n0").store_generation == 1)
    gang.coordinator.order(gang.run_order(1))
    await gang.until(lambda: gang.rank("n0", 1).phase == RANK_PHASE_EXITED)
    gang.coordinator.order(Order(duty=DUTY_EXIT, exit_code=5))
    assert await gang.exit_code("n0") == 5
    output = (gang.folder / "n0.out").read_text()
    assert output == gang.output(0, 1) + "\n"
    assert "to stderr" in output
    errors = (gang.folder / "n0.err").read_text()
    assert "  exitcode  : 5 (pid: " in errors
    assert "  traceback : it was meant\n" in errors
    assert " INFO " not in errors  # the agents' own lines are in their log


async def test_ranks_of_a_job_toml_write_to_their_logs_alone(gang: Gang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUSTER_RANK_ENVIRONMENT")
    await gang.start(1, "/bin/echo", "hello")
    gang.fence(0)
    await gang.until(lambda: gang.status("n0").store_generation == 1)
    gang.coordinator.order(gang.run_order(1))
    await gang.until(lambda: gang.rank("n0", 1).phase == RANK_PHASE_EXITED)
    gang.coordinator.order(Order(duty=DUTY_EXIT))
    assert await gang.exit_code("n0") == 0
    assert (gang.output(0, 1), (gang.folder / "n0.out").read_text()) == ("hello\n", "")
