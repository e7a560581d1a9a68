"""The wall clock of hosts is stepped by an hour, forwards and back, while real agents run there (libfaketime)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from muster.daemon.testing.scripted_gang import Gang, scripted_gang
from muster.v1.agent_pb2 import RankPhase

LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
STEPS = ("+3600", "-3600", "+0")

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed here (package faketime)")


class WallClock:
    """The wall clock of processes that have `environment`. Their monotonic clock is the real one."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "wall-clock"
        self.step("+0")
        self.environment = {
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def step(self, seconds: str) -> None:
        """Set the clock this many seconds ("+3600") ahead of the real one."""
        new = self._file.with_suffix(".new")
        new.write_text(seconds)
        new.rename(self._file)


@pytest.fixture
def clock(tmp_path: Path) -> WallClock:
    return WallClock(tmp_path)


@pytest_asyncio.fixture
async def gang(tmp_path: Path, clock: WallClock) -> AsyncIterator[Gang]:
    """A gang whose agents run under the stepped clock. This process has the real clock."""
    before = dict(os.environ)
    os.environ.update(clock.environment)  # the agents inherit it
    try:
        async with scripted_gang(tmp_path) as made:
            yield made
    finally:
        for name in clock.environment:
            os.environ.pop(name)
        os.environ.update(before)


async def test_agents_keep_their_ranks_and_accuse_nobody(gang: Gang, clock: WallClock) -> None:
    began = time.monotonic()
    script = gang.script("import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()\n")
    await gang.start(2, "python", script)
    pids = await gang.run()
    for generation, seconds in enumerate(STEPS, 2):
        clock.step(seconds)
        os.kill(pids[1], signal.SIGKILL)
        await gang.until(lambda g=generation: gang.rank("n1", g - 1).phase == RankPhase.RANK_PHASE_EXITED)  # type: ignore[misc]
        assert gang.rank("n0", generation - 1).phase == RankPhase.RANK_PHASE_RUNNING
        pids = await gang.run(generation)
    # A busy machine may silence an agent for a second, and its peer then says so. A silence that is longer than this
    # test is one that the clock has made.
    lasted_ms = 1000 * (time.monotonic() - began)
    accused = [gang.said(node, "accusation") for node in gang.nodes]
    assert not [said for of_node in accused for said in of_node if said.accusation.silent_ms > lasted_ms]
