"""The difference of a node's clock from the coordinator's."""

import asyncio
import re
from pathlib import Path

import pytest

from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.coordinator.services import conversion
from muster.daemon.host import clock
from muster.daemon.node.clock_offset import FRESH_S, ClockOffset
from muster.daemon.node.coordinator_stream import NodeStream
from muster.daemon.node.kept_memory.kept_memory_store import KeptMemoryStore
from muster.daemon.node.kept_memory.systemd_fd_store import FdStore
from muster.daemon.node.sensors.sensor import Observation, Sample
from muster.daemon.node.signal_windows import SignalRule, SignalWindows
from muster.daemon.testing.scripted_world import DEADLINE_S, ScriptedWorld
from muster.daemon.transport.identity import SecretCredentials
from muster.v1 import node_pb2

HOUR_S = 3600.0


class Host:
    """A host's clocks, which the test sets. `ahead_s`: by how much its wall clock is ahead."""

    def __init__(self, ahead_s: float) -> None:
        self.now, self.ahead_s = 100.0, ahead_s
        self.offset = ClockOffset(lambda: self.now, self.wall)

    def wall(self) -> float:
        return self.now + self.ahead_s

    def ask(self, there_s: float, back_s: float) -> None:
        """One heartbeat and its answer, that many seconds on their ways."""
        sent_at = self.now
        self.now += there_s + back_s
        self.offset.note(sent_at, sent_at + there_s)

    def sample(self) -> Sample:
        sample = self.offset.sample()
        assert sample is not None
        return sample


@pytest.mark.parametrize(("ahead_s", "held"), [(0.0, 0), (4.9, 0), (5.1, 1), (-4.9, 0), (-5.1, 1), (HOUR_S, 1)])
def test_a_clock_that_differs_by_more_than_five_seconds_is_one_that_differs(ahead_s: float, held: int) -> None:
    host = Host(ahead_s)
    host.ask(0.001, 0.001)
    assert host.sample().held == held


@pytest.mark.parametrize(("there_s", "back_s"), [(8.0, 0.0), (0.0, 8.0), (4.0, 4.0)])
def test_an_answer_that_was_long_on_its_way_accuses_no_clock(there_s: float, back_s: float) -> None:
    host = Host(0.0)
    host.ask(there_s, back_s)
    assert host.sample().held == 0


def test_the_words_say_which_clock_is_ahead() -> None:
    for ahead_s, words in ((7.25, "7.2 s ahead of the"), (-7.25, "7.2 s behind the")):
        host = Host(ahead_s)
        host.ask(0.0, 0.0)
        assert host.sample().text == f"this node's clock is {words} coordinator's"


def test_without_a_fresh_answer_nothing_is_known() -> None:
    host = Host(HOUR_S)
    assert host.offset.sample() is None
    host.ask(0.0, 0.0)
    host.now += FRESH_S
    assert host.offset.sample() is not None
    host.now += 1.0
    assert host.offset.sample() is None


async def test_a_clock_that_differs_for_ten_seconds_is_reported_and_the_shipped_policy_does_nothing() -> None:
    host, seen = Host(HOUR_S), list[Observation]()
    windows = SignalWindows(seen.append)
    policy = Policy.load()
    windows.use(SignalRule.from_message(conversion.signal_rule(rule)) for rule in policy.rules())

    async def next_second(_: float) -> None:
        host.ask(0.0, 1.0)
        if host.now > 100.0 + 20:
            raise asyncio.CancelledError

    host.offset = ClockOffset(lambda: host.now, host.wall, next_second)
    with pytest.raises(asyncio.CancelledError):
        await host.offset.run(windows.report)
    assert [(one.kind, one.code) for one in seen] == [("host-clock", 1)]
    assert policy.decide("host-clock", 1).action == "ignore"


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
async def test_a_coordinator_tells_an_attached_node_its_time(tmp_path: Path, ahead_s: float) -> None:
    world = ScriptedWorld.create(tmp_path)
    await world.start_coordinator()
    offset = ClockOffset(wall=lambda: clock.wall() + ahead_s)

    async def hello() -> node_pb2.NodeHello:
        return node_pb2.NodeHello(node="n1", boot_id="b", probe_address="127.0.0.1:1", incarnation="i")

    stream = NodeStream(
        world.address,
        SecretCredentials(tmp_path / "secret"),
        hello,
        0.05,
        KeptMemoryStore(FdStore("")),
        addresses=lambda: (),
        clock_offset=offset,
    )
    running = asyncio.create_task(stream.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            while (sample := offset.sample()) is None:  # noqa: ASYNC110  # nothing tells that an answer has come
                await asyncio.sleep(0)
        # An answer that is long on its way makes the difference less exact.
        told = re.fullmatch(r"this node's clock is (\d+)\.\d s (ahead of|behind) the coordinator's", sample.text)
        assert sample.held == 1.0
        assert told
        assert abs(int(told[1]) - HOUR_S) < 60
        assert (told[2] == "ahead of") == (ahead_s > 0)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await world.close()
