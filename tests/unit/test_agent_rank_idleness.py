"""Which ranks are idle, and for how long: from measurements, and from real agents with real ranks. No torch."""

import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from muster.daemon.agent.ranks.process_usage import TreeUsage
from muster.daemon.agent.ranks.rank_idleness import RankIdleness, RankKey, is_idle
from muster.daemon.testing.scripted_gang import Gang, scripted_gang

RANK = (3, 1)
USED = TreeUsage(cpu_s=100.0, io_bytes=5000, pids=frozenset({10, 11}))


def nothing() -> None:
    """Nobody is told."""


def pids() -> dict[RankKey, int]:
    return {}


@pytest.mark.parametrize(
    ("after", "idle"),
    [
        (USED, True),
        (replace(USED, cpu_s=100.1), True),
        (replace(USED, cpu_s=100.2), False),
        (replace(USED, io_bytes=5001), False),
        (replace(USED, pids=frozenset({10, 12})), False),
        (replace(USED, cpu_s=40.0, pids=frozenset({10})), False),
        (replace(USED, at_work=True), False),
    ],
    ids=["nothing", "a trace", "more than a trace", "a byte", "a new process", "an ended process", "it is at work"],
)
def test_what_a_rank_may_use_in_fifteen_seconds_of_idleness(after: TreeUsage, idle: bool) -> None:
    assert is_idle(USED, after, 15.0) is idle


def test_idle_intervals_are_counted_in_a_row_and_each_change_is_reported() -> None:
    changes: list[dict[RankKey, int]] = []
    idleness = RankIdleness(60.0, pids, lambda: changes.append(dict(idleness.reported())))
    busy = replace(USED, cpu_s=101.0)
    for usage in (USED, USED, USED, busy, busy):
        idleness.note({RANK: usage}, 15.0)
    assert [change[RANK] for change in changes] == [0, 1, 2, 0, 1]


def test_the_first_measurement_of_a_rank_says_nothing_and_a_rank_that_ended_is_forgotten() -> None:
    idleness = RankIdleness(60.0, pids, nothing)
    idleness.note({RANK: USED}, 15.0)
    idleness.note({RANK: USED}, 15.0)
    idleness.note({(3, 2): USED}, 15.0)
    assert idleness.reported() == {(3, 2): 0}


async def test_without_a_wish_of_the_job_nothing_is_measured() -> None:
    await RankIdleness(0.0, pids, nothing).run()  # returns


async def test_ranks_that_nobody_measures_any_more_are_not_idle() -> None:
    """Else a rank that goes on would be idle for ever."""
    rounds = 0

    def until_it_fails() -> dict[RankKey, int]:
        nonlocal rounds
        rounds += 1
        if rounds > 3:
            raise ValueError("no pid")
        return {RANK: os.getpid()}

    idleness = RankIdleness(0.04, until_it_fails, nothing)
    with pytest.raises(ValueError, match="no pid"):
        await idleness.run()
    assert idleness.reported() == {}


READS_FOR_EVER = """
    import os, socket
    ours, theirs = socket.socketpair()
    print(os.getpid(), flush=True)
    while os.environ["RANK"] == "1":
        pass
    ours.recv(1)
"""


@pytest.fixture
async def gang(tmp_path: Path) -> AsyncIterator[Gang]:
    async with scripted_gang(tmp_path) as found:
        yield found


async def test_an_agent_reports_a_rank_that_waits_in_a_socket_and_not_one_that_computes(gang: Gang) -> None:
    await gang.start(2, sys.executable, gang.script(READS_FOR_EVER), hang_after_idle_s=0.8)
    await gang.run(1)
    await gang.until(lambda: gang.rank("n0", 1).idle_quarters >= 5)
    await gang.until(lambda: gang.rank("n1", 1).HasField("idle_quarters"))
    assert gang.rank("n1", 1).idle_quarters == 0


async def test_an_agent_measures_nothing_where_the_job_does_not_ask(gang: Gang) -> None:
    await gang.start(1, sys.executable, gang.script(READS_FOR_EVER))
    await gang.run(1)
    assert not gang.rank("n0", 1).HasField("idle_quarters")
