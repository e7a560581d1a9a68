"""Two versions side by side: the rule, and what becomes of a pair that does not fit, of each kind of processes."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from muster import compatibility
from muster.checkpoint.format.errors import RestoreError
from muster.checkpoint.testing.gang_in_one_process import InProcessGang
from muster.checkpoint.training.agent_connection import AgentConnection, StartPoint
from muster.compatibility import PROTOCOL, Side, misfit, own_side, read, to_wire
from muster.daemon.agent.failure_detector.peer_link import LinkCallbacks, LinkEndpoints, PeerLink
from muster.daemon.agent.failure_detector.peers import AgentIdentity, PeerChannels, PeerService, make_agent_server
from muster.daemon.agent.failure_detector.version_check import VersionCheck
from muster.daemon.coordinator.core.state import facts
from muster.daemon.testing.scripted_coordinator import ScriptedCoordinator
from muster.daemon.testing.scripted_gang import Gang, scripted_gang
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld
from muster.daemon.transport.channel import bind, credential_metadata, open_channel
from muster.daemon.transport.fencing_timeouts import FENCING_TIMEOUTS_S
from muster.daemon.transport.identity import SecretCredentials
from muster.daemon.transport.server_limits import agent_limits
from muster.v1 import node_pb2, node_pb2_grpc, rank_pb2
from muster.v1.agent_pb2 import RANK_PHASE_EXITED, RANK_PHASE_RUNNING
from muster.v1.common_pb2 import Release

BEFORE = Release()
"""A version whose hello says nothing of itself."""
NEXT = Release(version="0.2.0", protocol=PROTOCOL + 1, oldest_protocol=PROTOCOL)
FAR = Release(version="9.0.0", protocol=PROTOCOL + 9, oldest_protocol=PROTOCOL + 1)
OTHER_TIMES = Release(
    version="9.0.0", protocol=PROTOCOL, oldest_protocol=PROTOCOL, accuse_after_ms=1250, self_fence_after_ms=3000
)
MINE = own_side("the coordinator", FENCING_TIMEOUTS_S)


@pytest.mark.parametrize("theirs", [BEFORE, to_wire(MINE), NEXT])
def test_versions_that_follow_each_other_fit(theirs: Release) -> None:
    assert misfit(MINE, read("the agent on n3", theirs)) is None
    assert misfit(read("the agent on n3", theirs), MINE) is None


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (
            FAR,
            f"the coordinator (muster 0.1.0) speaks protocol {PROTOCOL}, and the agent on n3 (muster 9.0.0) protocols",
        ),
        (OTHER_TIMES, "the agent on n3 (muster 9.0.0) accuses after 1.25 s of silence and fences after 3 s"),
    ],
)
def test_a_pair_that_does_not_fit_is_named_with_both_versions(theirs: Release, words: str, turned: bool) -> None:
    pair = [MINE, read("the agent on n3", theirs)]
    assert words in (misfit(*reversed(pair)) if turned else misfit(*pair) or "")


def test_a_process_without_a_part_in_fencing_fits_one_with_other_timeouts() -> None:
    assert misfit(own_side("musterd on n3"), read("the coordinator", OTHER_TIMES)) is None
    assert read("n3", to_wire(own_side("n3"))).fencing_ms is None


def test_the_protocol_of_the_version_before_is_served() -> None:
    """`OLDEST_PROTOCOL` never passes the protocol of the release before, so two releases in a row always fit."""
    assert compatibility.OLDEST_PROTOCOL in (PROTOCOL, PROTOCOL - 1)


def test_what_another_process_says_of_its_version_makes_one_short_line() -> None:
    said = read("n3", Release(version="1\n\x1b[2J" + 900 * "x", protocol=1)).version
    assert said.isprintable()
    assert len(said) <= compatibility.MAX_VERSION_CHARS


# --- with the coordinator ---


@pytest.mark.parametrize("theirs", [FAR, OTHER_TIMES])
async def test_a_gang_of_agents_that_do_not_fit_ends_before_ranks_start_and_says_why(
    world: ScriptedWorld, theirs: Release
) -> None:
    await world.start_agents([])
    for name in NODES:
        await world.start_agents([name])
        world.agents[name].hello.release.CopyFrom(theirs)
    await world.wait_for_facts(facts.GangEnded)
    assert world.gang.phase.value == "FAILED"
    reason = misfit(MINE, read("the agent on n1", theirs))
    assert reason
    assert reason in world.gang.reason
    assert not [order for agent in world.agents.values() for order in agent.orders if order.generation]


async def test_one_agent_that_does_not_fit_is_taken_out_and_the_gang_runs_without_it(world: ScriptedWorld) -> None:
    for name in NODES:
        await world.start_agents([name])
        if name == "n2":
            world.agents[name].hello.release.CopyFrom(OTHER_TIMES)
    await world.wait_for_duty("RUN 1", ["n1", "n3"])
    (removed,) = await world.wait_for_facts(facts.MemberRemoved)
    assert removed.node == "n2"
    assert "fences after 3 s" in removed.text


async def test_a_node_daemon_that_does_not_fit_is_refused_in_words(world: ScriptedWorld) -> None:
    hello = node_pb2.NodeHello(node="n1", boot_id="b", incarnation="d", release=FAR)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await _greet(world, hello)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert f"the coordinator (muster 0.1.0) speaks protocol {PROTOCOL}, and musterd on n1" in (
        refused.value.details() or ""
    )
    hello.ClearField("release")
    assert read("the coordinator", (await _greet(world, hello)).release) == own_side("the coordinator")


async def _greet(world: ScriptedWorld, hello: node_pb2.NodeHello) -> node_pb2.NodeOrder:
    async with open_channel(world.address, world.credentials) as channel:
        first = node_pb2.NodeMessage(hello=hello)
        metadata = await credential_metadata(channel, "/muster.v1.NodeService/Attach", first)
        stub: Any = node_pb2_grpc.NodeServiceStub(channel)
        call = stub.Attach(metadata=metadata)
        await call.write(first)
        answer: node_pb2.NodeOrder = await call.read()
        return answer


# --- the agent's own look ---


@pytest.fixture
async def gang(tmp_path: Path) -> AsyncIterator[Gang]:
    async with scripted_gang(tmp_path) as found:
        yield found


@pytest.mark.parametrize("theirs", [FAR, OTHER_TIMES])
async def test_an_agent_starts_no_ranks_for_a_coordinator_that_does_not_fit(gang: Gang, theirs: Release) -> None:
    gang.coordinator.release = theirs
    await gang.start(1, sys.executable, "-c", "print('started', flush=True)")
    gang.fence(0)
    await gang.until(lambda: gang.status("n0").store_generation == 1)
    await gang.until(lambda: bool(gang.status("n0").failure))
    assert gang.status("n0").failure == misfit(
        own_side("the agent on n0", FENCING_TIMEOUTS_S), read("the coordinator", theirs)
    )
    gang.coordinator.order(gang.run_order(1))
    gang.fence(1)
    await gang.until(lambda: gang.status("n0").fenced_generation == 1)
    assert not gang.log(0, 1).exists()


async def test_ranks_go_on_under_an_older_coordinator_and_end_under_one_that_does_not_fit(gang: Gang) -> None:
    await gang.start(1, sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(100)")
    await gang.run(1)
    await _take_over(gang, BEFORE)
    order = gang.run_order(1)
    serial = gang.coordinator.order(order)
    await gang.until(lambda: gang.status("n0").order_serial == serial)
    assert gang.rank("n0", 1).phase == RANK_PHASE_RUNNING
    await _take_over(gang, OTHER_TIMES)
    gang.coordinator.order(order)
    await gang.until(lambda: gang.rank("n0", 1).phase == RANK_PHASE_EXITED)
    assert "fences after 3 s" in gang.status("n0").failure


async def _take_over(gang: Gang, release: Release) -> None:
    """Replace the coordinator by one of another version."""
    port = int(gang.address.rpartition(":")[2])
    await gang.coordinator.stop()
    gang.coordinator = ScriptedCoordinator(SecretCredentials(gang.folder / "secret"))
    gang.coordinator.release = release
    await gang.coordinator.start(port)
    await gang.until(lambda: "n0" in gang.coordinator.agents)


# --- agents among themselves ---


@pytest.mark.parametrize(("theirs", "fits"), [(MINE, True), (read("", OTHER_TIMES), False), (read("", FAR), False)])
async def test_both_agents_of_a_pair_that_does_not_fit_know_it(tmp_path: Path, theirs: Side, fits: bool) -> None:
    credentials = SecretCredentials.create(tmp_path / "secret")
    found: dict[str, str] = {}
    ours, others = (
        VersionCheck("n0", lambda why: found.update(n0=why)),
        VersionCheck("n1", lambda w: found.update(n1=w)),
    )
    others.release = to_wire(theirs)
    others._side = read("the agent on n1", others.release)
    identity = AgentIdentity("g", "n1", "a", os.getuid())
    service = PeerService(identity, None, lambda: None, versions=others)  # type: ignore[arg-type]
    server = make_agent_server(credentials, agent_limits(members=2), identity, service)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    await server.start()
    channels, answered = PeerChannels(credentials, "g", plain_text=True), asyncio.Event()
    hooks = LinkCallbacks(lambda: 0, lambda node, pong: answered.set(), lambda node: None, ours)
    link = PeerLink(LinkEndpoints("g", "n0", "n1", address), channels.open_link, hooks)
    async with asyncio.timeout(120):
        await answered.wait()
    link.stop()
    await channels.close()
    await server.stop(None)
    assert set(found) == (set() if fits else {"n0", "n1"})
    assert all("the agent on n0" in why and "the agent on n1" in why for why in found.values())


@pytest.mark.parametrize(("coordinator", "peer"), [(to_wire(MINE), OTHER_TIMES), (BEFORE, FAR)])
def test_an_agent_that_fits_the_coordinator_is_not_ended_by_one_that_does_not(
    coordinator: Release, peer: Release
) -> None:
    found: list[str] = []
    check = VersionCheck("n0", found.append)
    check.meet_coordinator(coordinator)
    check.meet_agent("n1", peer)
    assert not found


def test_of_two_agents_that_both_fit_the_coordinator_and_not_each_other_each_says_so() -> None:
    found: list[str] = []
    check = VersionCheck("n0", found.append)
    between = Release(version="x", protocol=PROTOCOL + 1, oldest_protocol=PROTOCOL)
    newer = Release(version="y", protocol=PROTOCOL + 2, oldest_protocol=PROTOCOL + 1)
    check.meet_coordinator(between)
    assert not found
    check.meet_agent("n1", newer)
    assert len(found) == 1


# --- a rank and its agent ---


async def test_a_rank_whose_library_does_not_fit_its_agent_gets_no_state() -> None:
    gang = InProcessGang("g1")
    await gang.add("n0")
    gang.begin({0: "n0"}, None)
    with socket.socket(fileno=gang.socket(0, "n0")) as link:
        join = rank_pb2.RankJoin(rank=0, generation=gang.generation, release=FAR)
        link.send(rank_pb2.RankMessage(join=join).SerializeToString())
        answer = rank_pb2.AgentRankMessage.FromString(await asyncio.to_thread(link.recv, 1 << 16)).restore
    assert "this node's agent (muster 0.1.0)" in answer.refused
    assert "the library of rank 0 (muster 9.0.0)" in answer.refused
    assert read("", answer.release) == own_side("")
    await gang.close()


@pytest.mark.parametrize(("theirs", "fits"), [(BEFORE, True), (NEXT, True), (FAR, False)])
def test_a_rank_does_not_start_with_an_agent_that_does_not_fit_its_library(theirs: Release, fits: bool) -> None:
    agent, rank = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with agent:
        agent.send(rank_pb2.AgentRankMessage(restore=rank_pb2.AgentRestore(release=theirs)).SerializeToString())
        connection = AgentConnection(rank.detach(), 0, 1)
        if fits:
            assert connection.join() == StartPoint()
        else:
            with pytest.raises(RestoreError, match=r"the library of rank 0 .* and this node's agent .muster 9"):
                connection.join()
        connection.close()
        assert read("", rank_pb2.RankMessage.FromString(agent.recv(1 << 16)).join.release) == own_side("")
