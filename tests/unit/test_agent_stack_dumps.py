"""What the ranks of a generation that hangs were doing, on disk: real agents, real ranks. No torch."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.daemon.agent.ranks import stack_dumps
from muster.daemon.agent.ranks.stack_dumps import native_stacks
from muster.daemon.host import rank_log_files
from muster.daemon.host.held_folder import HeldFolder
from muster.daemon.testing.scripted_gang import Gang, scripted_gang

PYTHON = sys.executable
WAITS = """
    import os, time
    def wait_for_ever():
        while True:
            time.sleep(100)
    print(os.getpid(), flush=True)
    wait_for_ever()
"""
JOINS = """
    import os, time
    from muster.checkpoint.training.agent_connection import AgentConnection
    link = AgentConnection.from_environment()
    print(os.getpid(), flush=True)
    time.sleep(100)
"""


@pytest.fixture
async def gang(tmp_path: Path) -> AsyncIterator[Gang]:
    async with scripted_gang(tmp_path) as found:
        yield found


async def kept(gang: Gang, generation: int = 1) -> list[str]:
    """Order the stacks kept; what is in the files."""
    order = gang.run_order(generation)
    order.keep_stacks = True
    gang.coordinator.order(order)
    await gang.until(lambda: gang.all(lambda n: gang.status(n).stacks_generation == generation))
    paths = [rank_log_files.stacks_path(str(gang.folder), "g", generation, rank) for rank in range(len(gang.nodes))]
    return [path.read_text() for path in paths]


async def test_stacks_are_kept_once_and_the_ranks_run_on(gang: Gang) -> None:
    await gang.start(2, PYTHON, gang.script(WAITS))
    pids = await gang.run(1)
    texts = await kept(gang)
    for pid, text in zip(pids, texts, strict=True):
        assert f"process {pid} " in text
        assert re.search(rf"thread {pid}: [SR] \((sleeping|running)\)", text)  # it runs while it writes its stacks
        assert "in wait_for_ever" in text
    assert await kept(gang) == texts
    for pid in pids:
        os.kill(pid, 0)


async def test_a_stopped_rank_holds_nothing_up_and_its_state_is_told(gang: Gang) -> None:
    await gang.start(2, PYTHON, gang.script(WAITS))
    stopped, _ = await gang.run(1)
    os.kill(stopped, signal.SIGSTOP)
    first, second = await kept(gang)
    assert f"thread {stopped}: T (stopped)" in first
    assert "no Python stacks within 1 s" in first
    assert "in wait_for_ever" in second


async def test_a_command_that_is_not_python_is_not_signalled(gang: Gang) -> None:
    await gang.start(1, "sh", "-c", "sleep 100 & echo $$; wait")
    (pid,) = await gang.run(1)
    (text,) = await kept(gang)
    assert re.findall(r"^process (\d+)", text, re.MULTILINE)[0] == str(pid)
    assert text.count("process ") == 2  # the child, too
    assert "no Python stacks: it is not Python" in text
    os.kill(pid, 0)


async def test_a_rank_that_offers_its_stacks_twice_has_one_file_for_them(gang: Gang) -> None:
    await gang.start(1, PYTHON, gang.script(JOINS))  # once as the zygote's child, once by the library
    (pid,) = await gang.run(1)
    targets = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    assert sum("muster-stacks" in target for target in targets) == 1
    (text,) = await kept(gang)
    assert "line 6 in <module>" in text


async def test_a_script_below_another_command_is_found_where_it_uses_the_library(gang: Gang) -> None:
    name = gang.script(JOINS)
    await gang.start(1, "sh", "-c", f"{PYTHON} {name}; true")
    (pid,) = await gang.run(1)
    (text,) = await kept(gang)
    assert f"process {pid} " in text
    assert f'File "{gang.folder}/{name}", line 6' in text or f'File "{name}", line 6' in text


def test_of_endless_stacks_the_beginning_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "stack"
    file.write_bytes(b"x" * (stack_dumps.MAX_STACK_BYTES + 100))
    assert len(stack_dumps._PendingDump(1, str(file), 50).text()) == stack_dumps.MAX_STACK_BYTES


def program(folder: Path, text: str) -> str:
    """A program that stands in for py-spy: it is called as `PROGRAM dump --native --pid PID`."""
    path = folder / "py-spy"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_native_stacks_come_from_py_spy(tmp_path: Path) -> None:
    py_spy = program(tmp_path, 'echo "$@"; echo wrong >&2; exit 1')
    assert native_stacks(py_spy, [71, 72], time.monotonic() + 60.0) == {
        pid: f"dump --native --pid {pid}\nwrong\n" for pid in (71, 72)
    }


def test_native_stacks_that_take_too_long_are_given_up_for_all_processes_at_once(tmp_path: Path) -> None:
    began = tmp_path / "began"
    py_spy = program(tmp_path, f"echo $$ >> {began}; exec sleep 1000")
    texts = native_stacks(py_spy, [71, 72], time.monotonic())
    assert texts == dict.fromkeys([71, 72], "py-spy needs longer than a fence waits\n")


def test_a_py_spy_that_can_not_be_run_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "py-spy")
    assert native_stacks(missing, [71], 0.0) == {71: f"{missing} can't be run: No such file or directory\n"}


REGISTERS = """
import time
from muster.checkpoint.format import stack_file
stack_file.register()
print("ready", flush=True)
time.sleep(1000)
"""


def test_the_native_stacks_stand_after_all_else_in_the_file_of_a_rank(tmp_path: Path) -> None:
    file = tmp_path / "rank0.stacks"
    with subprocess.Popen([PYTHON, "-c", REGISTERS], stdout=subprocess.PIPE, env=os.environ) as rank:
        try:
            assert rank.stdout is not None
            assert rank.stdout.readline() == b"ready\n"
            with HeldFolder.open(tmp_path) as folder:
                stack_dumps.write_stacks(folder, {file.name: rank.pid}, program(tmp_path, 'echo "native of $4"'))
        finally:
            rank.kill()
    others, _, native = file.read_text().partition("\nnative stacks:\n")
    assert others.startswith(f"process {rank.pid} ")
    assert native == f"native of {rank.pid}\n"
