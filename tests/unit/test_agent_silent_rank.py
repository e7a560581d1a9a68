"""A rank in which one thread keeps the GIL, as its agent reports it: real agents, real ranks. No torch."""

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muster.daemon.host import rank_log_files
from muster.daemon.testing.scripted_gang import Gang, scripted_gang

PYTHON = sys.executable
KEEPS_GIL = """
    import ctypes, os, time
    from muster.checkpoint.training.agent_connection import AgentConnection
    link = AgentConnection.from_environment()
    def keep_gil_for_ever():
        while True: ctypes.PyDLL(None).sleep(3600)  # it needs no processor; a signal ends the sleep
    print(os.getpid(), flush=True)
    if os.environ["RANK"] == "2":
        link.declare_phase("export")
    while os.environ["RANK"] == "0":
        time.sleep(0.1)
    keep_gil_for_ever()
"""


@pytest.fixture
async def gang(tmp_path: Path) -> AsyncIterator[Gang]:
    async with scripted_gang(tmp_path) as found:
        yield found


def silence(gang: Gang, node: str) -> int | None:
    rank = gang.rank(node, 1)
    return rank.silent_s if rank.HasField("silent_s") else None


async def test_a_rank_that_keeps_the_gil_is_silent_and_writes_its_stacks(gang: Gang) -> None:
    """Its fellow is not silent, nor is the rank that declared a phase before."""
    await gang.start(3, PYTHON, gang.script(KEEPS_GIL))
    await gang.run(1)
    await gang.until(lambda: (silence(gang, "n1") or 0) >= 4)
    assert [silence(gang, node) for node in ("n0", "n2")] == [0, 0]
    order = gang.run_order(1)
    order.keep_stacks = True
    gang.coordinator.order(order)
    await gang.until(lambda: gang.all(lambda n: gang.status(n).stacks_generation == 1))
    texts = [rank_log_files.stacks_path(str(gang.folder), "g", 1, rank).read_text() for rank in range(3)]
    assert "in keep_gil_for_ever" in texts[1]  # the handler of the signal needs no GIL
    assert "signs_of_life.py" in texts[1]
    assert "in keep_gil_for_ever" not in texts[0]
    assert not gang.rank("n1", 1).hang_place.waits
    assert gang.rank("n1", 1).hang_place.where.startswith("keep_gil_for_ever (train.py:6)")


async def test_a_stopped_rank_is_silent_until_it_goes_on(gang: Gang) -> None:
    await gang.start(1, PYTHON, gang.script(KEEPS_GIL))
    (pid,) = await gang.run(1)
    await gang.until(lambda: silence(gang, "n0") == 0)
    os.kill(pid, signal.SIGSTOP)
    await gang.until(lambda: silence(gang, "n0") == 4)
    os.kill(pid, signal.SIGCONT)
    await gang.until(lambda: silence(gang, "n0") == 0)
