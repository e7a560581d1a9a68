"""The wall clock of the coordinator's host, and of a node, is stepped by an hour, forwards and back.

Each host has a wall clock that the test sets. Monotonic clocks are the real one, as on a host whose clock is set.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from cryptography import x509

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.observed_state import ObservedNode
from muster.daemon.coordinator.leadership.steady_clock import SteadyClock
from muster.daemon.host import clock
from muster.daemon.host.clock_steps import ClockSteps
from muster.daemon.node.daemon import NodeDaemon, NodeSettings
from muster.daemon.node.sensors.sensor import SensorPaths
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld
from muster.daemon.transport import authority
from muster.daemon.transport.call_binding import name_of_agent
from muster.daemon.transport.channel import open_channel
from muster.daemon.transport.identity import SecretCredentials
from muster.daemon.transport.reachability import Probed, probe
from muster.v1 import agent_pb2, api_pb2, api_pb2_grpc

DEADLINE_S = 120.0
HOUR_S = 3600.0
HOST = os.uname().nodename


class HostClock:
    """The wall clock of one host: `step_s` ahead of the real one."""

    def __init__(self) -> None:
        self.step_s = 0.0

    def wall(self) -> float:
        """Seconds since the epoch."""
        return clock.wall() + self.step_s


def warnings(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    """The warnings that hold `words`."""
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [line for line in said if words in line]


async def list_jobs(world: ScriptedWorld) -> int:
    """How many jobs the coordinator lists."""
    async with open_channel(world.address, world.credentials) as channel:
        return len((await api_pb2_grpc.MusterStub(channel).List(api_pb2.ListRequest())).gangs)


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
async def test_a_stepped_coordinator_recovers_jobs_and_blames_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step_s: float
) -> None:
    world, host = ScriptedWorld.create(tmp_path), HostClock()
    others = world.credentials
    world.credentials = own = SecretCredentials(tmp_path / "secret", host.wall)
    await world.start_coordinator()
    world.credentials = others
    assert world.coordinator
    engine = world.coordinator.engine
    engine.clock = SteadyClock(engine.journal.last_at, host.wall)
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    host.step_s = step_s
    live = Probed(world.agents["n1"].address, "n1", name_of_agent("g1", "n1"))
    assert await probe(live, own, 2.0) is None, "a refusal is a sign of life"
    for agent in world.agents.values():
        agent.unreachable["n2"] = agent_pb2.SILENCE_CLOSED
    await world.agents["n2"].die()
    await world.wait_for_duty("RUN 2", ["n1", "n3"])
    assert [record.node for record in await world.wait_for_facts(facts.MemberRemoved)] == ["n2"]
    caller = "behind" if step_s > 0 else "ahead of"
    words = f"caller's clock is {caller} the server's: set the clocks of both hosts"
    with pytest.raises(grpc.aio.AioRpcError, match=words):
        await list_jobs(world)
    await until_said(caplog, f"the wall clock of {HOST} was set by {step_s:+.0f} s")
    host.step_s = 0.0
    assert await list_jobs(world) == 1
    await until_said(caplog, f"the wall clock of {HOST} was set by {-step_s:+.0f} s")
    times = [record.at for record in engine.journal.history("", 0, 10_000)]
    assert times == sorted(times)
    assert abs(times[-1] - clock.wall()) < DEADLINE_S, "the times of the journal do not jump"
    await world.close()


async def until_said(caplog: pytest.LogCaptureFixture, words: str) -> None:
    """Wait for the warning."""
    async with asyncio.timeout(DEADLINE_S):
        while not warnings(caplog, words):  # noqa: ASYNC110  # nothing tells that a line was logged
            await asyncio.sleep(0)


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])
async def test_a_node_with_a_stepped_clock_stays_attached_and_comes_back_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step_s: float
) -> None:
    world, host = ScriptedWorld.create(tmp_path), HostClock()
    world.settings["heartbeat_s"] = 0.05
    await world.start_coordinator()
    (tmp_path / "kmsg").touch()
    daemon = NodeDaemon(
        NodeSettings(
            node="n1",
            coordinator=world.address,
            listen="127.0.0.1:0",
            credentials=SecretCredentials(tmp_path / "secret", host.wall),
            heartbeat_s=0.05,
            roots=SensorPaths(kmsg=tmp_path / "kmsg"),
        )
    )
    host.step_s = step_s
    running = asyncio.create_task(daemon.run())
    await until_said(caplog, "set the clocks of both hosts (NTP)")
    host.step_s = 0.0
    await attached(world)
    caplog.clear()
    host.step_s = step_s
    await heard_again(world)
    await heard_again(world)
    assert not warnings(caplog, "not attached")
    address = world.address
    await world.stop_coordinator()
    await world.start_coordinator(listen=address)
    await until_said(caplog, "not attached")
    assert not observed(world).attached
    host.step_s = 0.0
    await attached(world)
    assert world.coordinator
    assert world.coordinator.engine.core.state.node("n1").health == "FIT"
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    await world.close()


def observed(world: ScriptedWorld) -> ObservedNode:
    """What the coordinator observes of n1."""
    assert world.coordinator
    return world.coordinator.engine.core.observed.node("n1")


async def attached(world: ScriptedWorld) -> None:
    """Wait until the daemon of n1 is attached."""
    async with asyncio.timeout(DEADLINE_S):
        while not observed(world).attached:  # noqa: ASYNC110  # heartbeats tell nobody
            await asyncio.sleep(0)


async def heard_again(world: ScriptedWorld) -> None:
    """Wait for another heartbeat of n1."""
    before = observed(world).heard_at
    async with asyncio.timeout(DEADLINE_S):
        while observed(world).heard_at == before:  # noqa: ASYNC110  # heartbeats tell nobody
            await asyncio.sleep(0)


def test_a_certificate_is_valid_where_the_clock_is_an_hour_behind_or_ahead() -> None:
    issuing = authority.Authority.create("site")
    key = authority.bytes_of_public_key(authority.make_key())
    made = x509.load_pem_x509_certificate(issuing.issue(key, ["n1"]))
    for certificate in (issuing.certificate, made):
        assert certificate.not_valid_before_utc.timestamp() < clock.wall() - HOUR_S
        assert certificate.not_valid_after_utc.timestamp() > clock.wall() + HOUR_S


def test_a_slow_correction_is_no_step_and_a_step_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    offset = [0.0]
    steps = ClockSteps(lambda: offset[0])
    for _ in range(1000):
        offset[0] += 0.1
        steps.note()
    assert not caplog.records
    offset[0] -= HOUR_S
    steps.note()
    steps.note()
    assert len(warnings(caplog, f"the wall clock of {HOST} was set by -3600 s")) == len(caplog.records) == 1
