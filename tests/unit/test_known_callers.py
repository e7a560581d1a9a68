"""What a user with a credential can hold at each server: the attacks, tried against the real servers.

The callers send what no client of gRPC sends (`half_calls`). docs/SECURITY.md has the table of what is left to them.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from muster.daemon.agent.failure_detector.peers import AgentIdentity, PeerService, make_agent_server
from muster.daemon.coordinator.services.caller_limits import LINES_AT_ONCE
from muster.daemon.host import clock
from muster.daemon.node.daemon import make_probe_server
from muster.daemon.testing.chosen_users import ChosenUser
from muster.daemon.testing.half_calls import HalfCaller
from muster.daemon.testing.no_shards import NoShards
from muster.daemon.testing.scripted_world import ScriptedWorld, spec
from muster.daemon.transport import authority_table, call_binding
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.call_binding import payload_of_call
from muster.daemon.transport.calls.call_places import ShareCalls, admitted_call
from muster.daemon.transport.calls.call_refused import CallRefused
from muster.daemon.transport.calls.call_share import CallShare
from muster.daemon.transport.channel import bind, open_channel, stop_server
from muster.daemon.transport.reachability import Probed, probe
from muster.daemon.transport.server_limits import (
    COORDINATOR,
    HEALTH_CALLS,
    KIB,
    LOCAL_SERVER,
    MIB,
    NODE_DAEMON,
    REFLECTION_CALLS,
    SHARD_MESSAGE_BYTES,
    STRANGERS_AT_AGENT,
    StreamLimits,
    agent_limits,
    coordinator_share,
)
from muster.v1 import agent_pb2 as pb
from muster.v1 import api_pb2, api_pb2_grpc, common_pb2, peer_pb2, peer_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
SLURM, OWNER, STRANGER, ANOTHER = 64030, 1001, 1002, 1003
AGENT = call_binding.name_of_agent("g1", "n1")
MUSTERD = call_binding.name_of_node_daemon("n1")
DEADLINE_S = 60.0
PING, ATTACH = "/muster.v1.ProbeService/Ping", "/muster.v1.AgentService/Attach"
REGISTER = "/muster.v1.Muster/Register"
SOON_S = 0.1
"""The first messages of calls come within so long in most of these tests. The servers give them seconds."""
BUSY, LATE = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
UNCHECKED = grpc.StatusCode.UNAVAILABLE.value[0]
"""A Ping whose credential is not checked within 0.2 s, on a busy machine."""


@dataclass(frozen=True)
class Served:
    """A server under attack: where it listens, its name, whose credentials it accepts, and the coordinator's Slurm."""

    address: str
    name: str
    users: ChosenUser
    slurm: Any = None

    def token(self, uid: int, method: str, message: bytes = b"") -> str:
        return self.users.as_uid(uid).issue(payload_of_call(method, self.name, message))


Serving = Callable[..., Awaitable[Served]]
Change = Callable[[CallShare], CallShare]


def soon(share: CallShare) -> CallShare:
    return replace(share, reading_wait_s=SOON_S, first_message_s=SOON_S, unread_s=SOON_S)


async def agent(_: Path, stack: AsyncExitStack, change: Change = soon) -> Served:
    """The agent of a gang of two nodes of `OWNER`."""
    users, identity = ChosenUser(OWNER), AgentIdentity("g1", "n1", "a", OWNER)
    limits, service = agent_limits(2), PeerService(identity, NoShards(), lambda: None)
    server = make_agent_server(
        users, replace(limits, calls=change(limits.calls)), identity, service, change(STRANGERS_AT_AGENT)
    )
    return Served(await _start(server, stack), AGENT, users)


async def musterd(_: Path, stack: AsyncExitStack, change: Change = soon) -> Served:
    users = ChosenUser(SLURM)
    server = make_probe_server(users, "n1", "d", limits=replace(NODE_DAEMON, calls=change(NODE_DAEMON.calls)))
    return Served(await _start(server, stack), MUSTERD, users)


async def coordinator(folder: Path, stack: AsyncExitStack, change: Change = soon, **settings: Any) -> Served:
    users = ChosenUser(SLURM)
    world = ScriptedWorld.create(folder, owner_uid=OWNER)
    world.credentials, world.rights = users, Rights(frozenset(), own_uid=SLURM)
    world.settings |= {"share_of": lambda method: change(coordinator_share(method)), **settings}
    await world.start_coordinator()
    stack.push_async_callback(world.close)
    return Served(world.address, "127.0.0.1", users, world.slurm)


async def _start(server: Any, stack: AsyncExitStack) -> str:
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    await server.start()
    stack.push_async_callback(stop_server, server, 0.0)
    return address


@asynccontextmanager
async def attacked(
    serving: Serving, folder: Path, change: Change = soon, **settings: Any
) -> AsyncIterator[tuple[Served, Any]]:
    """A server, and a function that opens connections to it."""
    async with AsyncExitStack() as stack, asyncio.timeout(DEADLINE_S):
        served = await serving(folder, stack, change, **settings)

        async def connect(**given: Any) -> HalfCaller:
            caller = await HalfCaller.open(served.address, **given)
            stack.push_async_callback(caller.close)
            return caller

        yield served, connect


def methods_of(*services: str) -> list[str]:
    return [method for method in authority_table.AUTHORITY if method.split("/")[1].split(".")[-1] in services]


TRIED = [
    *((coordinator, method, STRANGER) for method in methods_of("Muster", "Diagnosis", "Goodput", "AgentService")),
    (coordinator, "/muster.v1.NodeService/Attach", 0),
    *((coordinator, method, STRANGER) for method in methods_of("Health", "ServerReflection")),
    (musterd, PING, STRANGER),
    (agent, PING, STRANGER),
    *((agent, method, OWNER) for method in methods_of("PeerService")),
]


def test_every_method_is_tried() -> None:
    assert {method for _, method, _ in TRIED} == set(authority_table.AUTHORITY)


@pytest.mark.parametrize(("serving", "method", "uid"), TRIED, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("message", [None, b"half"], ids=["nothing", "half a message"])
async def test_a_call_without_a_whole_message_ends(
    serving: Serving, method: str, uid: int, message: bytes | None, tmp_path: Path
) -> None:
    if method.endswith("Drain"):
        uid = SLURM  # nobody else gets so far
    async with attacked(serving, tmp_path) as (served, connect):
        caller = await connect()
        call = caller.call(method, served.token(uid, method), message, size=100)
        assert await caller.ended([call]) == [LATE]


async def test_calls_of_a_stranger_leave_the_owner_and_the_coordinator_their_places_at_an_agent(
    tmp_path: Path,
) -> None:
    """The attack: Pings of which only the headers come hold every place of another user's agent."""

    def patient(share: CallShare) -> CallShare:
        """What the strangers hold ends with the test, and not before."""
        return replace(share, reading_wait_s=DEADLINE_S, first_message_s=DEADLINE_S)

    most = STRANGERS_AT_AGENT.user_calls
    async with attacked(agent, tmp_path, patient) as (served, connect):
        callers = [await connect() for _ in range(5)]
        for caller in callers:
            for _ in range(190):
                caller.call(PING, served.token(STRANGER, PING))
        while sum(len(caller.statuses) for caller in callers) < 5 * 190 - most:  # noqa: ASYNC110
            await asyncio.sleep(0)
        refused = Counter(status for caller in callers for status in caller.statuses.values())
        assert refused == {BUSY: 5 * 190 - most}
        async with open_channel(served.address, served.users, server=AGENT) as channel:
            stub: Any = peer_pb2_grpc.PeerServiceStub(channel)
            await stub.Stored(peer_pb2.StoredReport(gang_id="g1"))
        probed = Probed(served.address, "n1", AGENT)
        assert await probe(probed, served.users.as_uid(SLURM), 10.0) is None


@pytest.mark.parametrize(("serving", "name"), [(agent, AGENT), (musterd, MUSTERD)], ids=["agent", "musterd"])
async def test_a_probe_is_answered_while_strangers_hold_all_reading_places(
    serving: Serving, name: str, tmp_path: Path
) -> None:
    """Several users together. The coordinator would take a process for hung that lets it wait."""

    def patient(share: CallShare) -> CallShare:
        return replace(share, first_message_s=DEADLINE_S)

    async with attacked(serving, tmp_path, patient) as (served, connect):
        callers = [await connect() for _ in range(16)]
        for number, caller in enumerate(callers):
            for _ in range(4):
                caller.call(PING, served.token(STRANGER + number, PING), b"half", size=100)
        assert await probe(Probed(served.address, "n1", name), served.users.as_uid(SLURM), DEADLINE_S / 2) is None


@pytest.mark.parametrize(
    ("serving", "method", "message_bytes", "share"),
    [
        (coordinator, ATTACH, 4 * MIB, coordinator_share(ATTACH)),
        (coordinator, REGISTER, 4 * MIB, coordinator_share(REGISTER)),
        (agent, PING, 16 * MIB, STRANGERS_AT_AGENT),
    ],
    ids=["agents", "users", "strangers"],
)
async def test_half_messages_of_one_user_take_little(
    serving: Serving, method: str, message_bytes: int, share: CallShare, tmp_path: Path
) -> None:
    """The attack: a user without a job sends all but the last byte of many large messages."""
    window = 64 * KIB
    async with attacked(serving, tmp_path, lambda share: replace(share, reading_wait_s=1.0, first_message_s=1.0)) as (
        served,
        connect,
    ):
        callers, begun_at = [await connect() for _ in range(16)], clock.monotonic()
        most = bytes(message_bytes - 100)
        calls = [
            (caller, [caller.call(method, served.token(STRANGER, method), most, size=message_bytes) for _ in range(4)])
            for caller in callers
        ]
        for caller, begun in calls:
            assert set(await caller.ended(begun)) <= {BUSY, LATE, UNCHECKED}
        turns = 2 + int(clock.monotonic() - begun_at)  # a place is free again when its call has had its second
        assert sum(caller.sent for caller in callers) <= turns * share.reading * message_bytes + 64 * window


@pytest.mark.parametrize("message", [None, b"\x0a"], ids=["nothing", "half a message"])
async def test_calls_of_one_user_count_before_their_messages_come(message: bytes | None, tmp_path: Path) -> None:
    """The attack: more calls of Register than one user may have, all before the first one is counted."""

    def few(share: CallShare) -> CallShare:
        return replace(share, user_calls=10)

    async with attacked(coordinator, tmp_path, few) as (served, connect):
        callers = [await connect() for _ in range(10)]
        for caller in callers:
            for _ in range(3):
                caller.call(REGISTER, served.token(STRANGER, REGISTER), message, size=100)
        while sum(len(caller.statuses) for caller in callers) < 20:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert Counter(status for caller in callers for status in caller.statuses.values()) == {BUSY: 20}
        other = await connect()
        body = b"\x0a\x02g9"
        call = other.call(REGISTER, served.token(ANOTHER, REGISTER, body), body)
        assert (await other.ended([call]))[0] not in (BUSY, LATE)


@pytest.mark.parametrize("serving", [agent, musterd, coordinator])
async def test_a_call_whose_answer_nobody_reads_ends(
    serving: Serving, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its status waits behind the answer, so it keeps its place, which is its user's, until its connection ends."""
    method = "/muster.v1.Muster/Nodes" if serving is coordinator else PING
    message = b"" if serving is coordinator else common_pb2.PingRequest(nonce="x").SerializeToString()
    async with attacked(serving, tmp_path, lambda share: replace(share, unread_s=SOON_S, user_calls=1)) as (
        served,
        connect,
    ):
        caller = await connect(reads=False)
        call = caller.call(method, served.token(STRANGER, method, message), message)
        await caller.answered(call)
        other = await connect()
        second = other.call(method, served.token(STRANGER, method, message), message)
        assert await other.ended([second]) == [BUSY]
        await asyncio.sleep(2 * SOON_S)  # the time that an answer may be left unread is real
        caller.read(call)
        assert await caller.ended([call]) == [LATE]
        assert not caplog.records


@pytest.mark.parametrize("serving", [agent, musterd, coordinator])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "given up"])
async def test_a_client_that_leaves_without_reading_adds_nothing_to_the_log(
    serving: Serving, late: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The attack: many calls whose client leaves before the answer is read. gRPC logged a traceback for each."""
    method = "/muster.v1.Muster/Nodes" if serving is coordinator else PING
    message = b"" if serving is coordinator else common_pb2.PingRequest(nonce="x").SerializeToString()
    async with attacked(serving, tmp_path, lambda share: replace(share, unread_s=SOON_S, user_calls=1)) as (
        served,
        connect,
    ):
        caller, other = await connect(reads=False), await connect()
        call = caller.call(method, served.token(STRANGER, method, message), message)
        await caller.answered(call)
        if late:
            await asyncio.sleep(2 * SOON_S)  # the time that an answer may be left unread is real
        await caller.close()
        while (await other.ended([other.call(method, served.token(STRANGER, method, message), message)]))[0] == BUSY:
            pass
    assert not caplog.records


async def test_one_user_leaves_few_large_answers_unread(tmp_path: Path) -> None:
    def little(share: CallShare) -> CallShare:
        return replace(share, unread_answer_bytes=1)

    async with attacked(coordinator, tmp_path, little) as (served, connect):
        caller = await connect(reads=False)
        method = "/muster.v1.Muster/Nodes"
        calls = [caller.call(method, served.token(STRANGER, method), b"") for _ in range(3)]
        while len(caller.statuses) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert Counter(caller.statuses[call] for call in calls if call in caller.statuses) == {BUSY: 2}


async def _another_is_refused(calls: ShareCalls) -> bool:
    async def another() -> bool:
        try:
            calls.take(STRANGER)
        except CallRefused:
            return True
        return False

    refused = await asyncio.create_task(another())
    await asyncio.sleep(0)  # its place is given back
    return refused


async def test_an_admitted_call_counts_for_its_user_only_before_and_after() -> None:
    """The stream of an agent lasts as long as its job. Then its client may keep the call from ending."""
    calls, done = ShareCalls(CallShare("one", calls=10, user_calls=1, reading=1, all_reading=1)), False

    async def call() -> None:
        nonlocal done
        calls.take(STRANGER)
        assert await _another_is_refused(calls)
        with admitted_call("n1"):
            assert not await _another_is_refused(calls)
        assert await _another_is_refused(calls)
        done = True

    await asyncio.create_task(call())
    await asyncio.sleep(0)
    assert done
    assert not await _another_is_refused(calls)


def _behind(first: bytes, *others: bytes) -> bytes:
    """The messages of one call, of which HalfCaller counts the first one only."""
    return first + b"".join(b"\x00" + len(other).to_bytes(4, "big") + other for other in others)


def _of_an_agent() -> tuple[bytes, bytes]:
    """The first message of the agent of job 1 on n1, and all its messages."""
    hello = pb.AgentHello(
        gang_id="g1", slurm_job_id=1, node="n1", incarnation="a", spec=spec(), peer_address="127.0.0.1:1"
    )
    first = pb.AgentMessage(hello=hello).SerializeToString()
    return first, _behind(first, pb.AgentMessage(status=pb.AgentStatus()).SerializeToString())


async def test_one_agent_has_few_streams_that_have_not_ended(tmp_path: Path) -> None:
    """The attack: a user with a job of one node attaches its agent again and again, and reads no answer. Each stream is
    replaced, but can't end. Once admitted, none counted for anybody: they took the places of all agents of the site."""

    def few(share: CallShare) -> CallShare:
        return replace(share, admitted_calls=2)

    async with attacked(coordinator, tmp_path, few) as (served, connect):
        caller, other = await connect(reads=False), await connect()
        first, whole = _of_an_agent()
        for _ in range(2):
            call = caller.call(ATTACH, served.token(OWNER, ATTACH, first), whole, size=len(first))
            await caller.answered(call)
        further = [other.call(ATTACH, served.token(OWNER, ATTACH, first), whole, size=len(first)) for _ in range(3)]
        assert await other.ended(further) == [BUSY] * 3


async def test_streams_that_can_not_end_count_for_their_user_when_the_gang_is_gone(tmp_path: Path) -> None:
    """The attack: a user runs short jobs. The streams of their agents, whose answers nobody reads, outlive each job.
    Once their gang was gone they counted for nobody: 17,000 of them took the places of all agents of the site."""

    def few(share: CallShare) -> CallShare:
        return replace(share, unread_s=SOON_S, user_calls=1)

    async with attacked(coordinator, tmp_path, few, stream_limits=StreamLimits(unread_s=SOON_S)) as (served, connect):
        caller, other = await connect(reads=False), await connect()
        first, whole = _of_an_agent()
        call = caller.call(ATTACH, served.token(OWNER, ATTACH, first), whole, size=len(first))
        await caller.answered(call)
        async with open_channel(served.address, served.users.as_uid(OWNER)) as channel:
            stub: Any = api_pb2_grpc.MusterStub(channel)
            await stub.Cancel(api_pb2.GangRef(gang_id="g1"))
        # Until the coordinator has given up the stream, and the gang has ended: then its user may have one call.
        while (await other.ended([other.call(ATTACH, served.token(OWNER, ATTACH), b"")]))[0] != BUSY:
            pass


async def test_refused_attaches_of_one_user_do_not_fill_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The attack: a user attaches agents to the job of another, again and again. Each refusal was a line of the log."""
    async with attacked(coordinator, tmp_path) as (served, connect):
        caller, (first, whole) = await connect(), _of_an_agent()
        for _ in range(2 * LINES_AT_ONCE):
            call = caller.call(ATTACH, served.token(STRANGER, ATTACH, first), whole, size=len(first))
            assert await caller.ended([call]) == [grpc.StatusCode.PERMISSION_DENIED.value[0]]
    assert len([line for line in caplog.messages if "is rejected" in line]) == LINES_AT_ONCE


async def test_a_health_check_is_answered_while_strangers_hold_all_of_reflection(tmp_path: Path) -> None:
    """The attack: a host without a credential opens streams of reflection. A load balancer took the coordinator for
    dead."""
    check, reflection = "/grpc.health.v1.Health/Check", methods_of("ServerReflection")[0]

    def patient(share: CallShare) -> CallShare:
        return replace(share, reading_wait_s=DEADLINE_S, first_message_s=DEADLINE_S)

    async with attacked(coordinator, tmp_path, patient) as (_, connect):
        strangers, monitor = [await connect() for _ in range(REFLECTION_CALLS.calls + 1)], await connect()
        for stranger in strangers:
            stranger.call(reflection, "", b"half", size=100)
        while not any(stranger.statuses for stranger in strangers):  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert [stranger.statuses for stranger in strangers if stranger.statuses] == [{1: BUSY}]
        assert await monitor.ended([monitor.call(check, "", b"")]) == [0]


async def test_a_later_message_of_a_public_stream_must_come_soon(tmp_path: Path) -> None:
    """The attack: without a credential, 64 streams of reflection each hold a large half message for ever."""
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    async with attacked(coordinator, tmp_path) as (_, connect):
        caller = await connect()
        call = caller.call(method, "", b"\x00" + (4 * MIB).to_bytes(4, "big") + b"half", size=0)
        assert await caller.ended([call]) == [LATE]


SERVERS = ("daemon", "checkpoint")
WRITERS = {"daemon/transport/calls/call_messages.py"}


def test_no_server_writes_without_a_bound() -> None:
    files = [file for folder in SERVERS for file in (ROOT / folder).rglob("*.py") if "testing" not in file.parts]
    writing = {str(file.relative_to(ROOT)) for file in files if re.search(r"context\.write\(", file.read_text())}
    assert writing == WRITERS


def _cells(share: CallShare, message_bytes: int) -> tuple[str, ...]:
    size = f"{message_bytes // MIB} MiB" if message_bytes >= MIB else f"{message_bytes // KIB} KiB"
    seconds = (share.reading_wait_s + share.first_message_s) * (share.first_messages or 1)
    return f"{share.user_calls:,} of {share.calls:,}", f"{share.reading} × {size}", f"{seconds:g}"


@pytest.mark.parametrize(
    ("server", "share", "message_bytes"),
    [
        ("coordinator, the public API", coordinator_share(REGISTER), COORDINATOR.message_bytes),
        ("coordinator, agents that attach", coordinator_share(ATTACH), COORDINATOR.message_bytes),
        ("coordinator, health,", HEALTH_CALLS, COORDINATOR.message_bytes),
        ("coordinator, reflection,", REFLECTION_CALLS, COORDINATOR.message_bytes),
        ("agent of another user", STRANGERS_AT_AGENT, SHARD_MESSAGE_BYTES),
        ("`musterd` |", NODE_DAEMON.calls, NODE_DAEMON.message_bytes),
        ("`musterd`, `/run/muster/nvhcd.sock`", LOCAL_SERVER.calls, LOCAL_SERVER.message_bytes),
    ],
)
def test_the_table_says_what_the_servers_allow(server: str, share: CallShare, message_bytes: int) -> None:
    text = (ROOT / "docs/SECURITY.md").read_text().partition("## What one user can hold")[2].partition("\n## ")[0]
    [row] = [line for line in text.splitlines() if line.startswith(f"| {server}")]
    for cell in _cells(share, message_bytes):
        assert cell in row
