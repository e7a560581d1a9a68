"""The three services on loopback: who may attach and call, and what the replies say."""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.journal.journal import Journal, JournalError
from muster.daemon.coordinator.leadership.steady_clock import SteadyClock
from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.coordinator.services import views
from muster.daemon.coordinator.services.callers_gangs import LastingRight
from muster.daemon.coordinator.services.node_service import ENDS_AT_ONCE, RETURN_S_PER_NODE
from muster.daemon.coordinator.services.rpc_errors import resource_exhausted
from muster.daemon.coordinator.services.watching import (
    MIN_VIEW_INTERVAL_S,
    WATCHERS_SHARE,
    SharedView,
    WatchedGangs,
    changed_views,
)
from muster.daemon.coordinator.shell.agent_streams import SILENT_STREAM_S, AgentOutbox
from muster.daemon.coordinator.shell.subscriptions import Changes, GangSubscribers
from muster.daemon.coordinator.slurm.watch import node_seen
from muster.daemon.testing.scripted_agent import ScriptedAgent
from muster.daemon.testing.scripted_world import DEADLINE_S, NODES, ScriptedWorld, spec
from muster.daemon.transport.calls.call_refused import CallRefused
from muster.daemon.transport.channel import credential_metadata, open_channel
from muster.fabric.sources.slurm_topology import SlurmTopology
from muster.launcher.output.job_lines import job_ids
from muster.node_health import NodeHealth
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm
from muster.slurm.client.parsing.sbatch_request import JobRequest
from muster.slurm.client.states import NodeState
from muster.slurm.client.types import JobAnswers, Node, Unknown
from muster.v1 import agent_pb2, api_pb2, api_pb2_grpc, common_pb2, node_pb2, node_pb2_grpc

_NODE_ATTACH = "/muster.v1.NodeService/Attach"
REF = api_pb2.GangRef(slurm_job_id=1)


@pytest_asyncio.fixture
async def api(world: ScriptedWorld) -> AsyncIterator[Any]:
    """The public API, as a user calls it."""
    async with open_channel(world.address, world.credentials) as channel:
        yield api_pb2_grpc.MusterStub(channel)


async def _running(world: ScriptedWorld) -> None:
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])


async def _refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Status code and message with which a call ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


# -- agents ----------------------------------------------------------------------------------------------------------


def _stranger(job: int, gang: str) -> str:
    """What an agent is told that is not of the user of its job, or of its gang."""
    return (
        f"uid {os.getuid()} has no job {job} with gang {gang}: an agent attaches for a job and a gang of its own user"
    )


async def test_an_agent_of_another_users_job_is_rejected(tmp_path: Path) -> None:
    world = ScriptedWorld.create(tmp_path, owner_uid=os.getuid() + 1)
    await world.start_coordinator()
    agent = ScriptedAgent("n1", spec(), world.credentials)
    await agent.open()
    refusal = await _refusal(agent.attach(world.address))
    await agent.die()
    assert refusal == (grpc.StatusCode.PERMISSION_DENIED, _stranger(1, "g1"))
    assert world.coordinator
    assert not world.coordinator.engine.core.state.gangs
    async with open_channel(world.address, world.credentials) as channel:
        request = api_pb2.RegisterRequest(gang_id="g1", slurm_job_id=1, spec=spec())
        refusal = await _refusal(api_pb2_grpc.MusterStub(channel).Register(request))
    assert refusal == (grpc.StatusCode.NOT_FOUND, f"Slurm has no job 1, or it is not of uid {os.getuid()}")
    await world.close()


@pytest.mark.parametrize(
    "hello",
    [
        {"gang": "g1"},  # another user's job, and its gang
        {"gang": "g2"},  # the job, and a gang that there is not
        {"gang": "g1", "job": 77},  # the gang, and a job that there is not
        {"gang": "g2", "job": 77},
        {"gang": "g1", "pool": 5},
        {"gang": "g2", "pool": 5},
        {"gang": "g1", "restarts": 7},
        {"gang": "g2", "node": "n9"},
        {"gang": "g2", "node": "n2"},  # it calls from another address than this node's
    ],
    ids=str,
)
async def test_a_stranger_learns_nothing_of_jobs_and_gangs(tmp_path: Path, hello: dict[str, Any]) -> None:
    """The attack: any user asks for job after job which gang it runs, or guesses the gangs of others."""
    owner = os.getuid() + 1
    world = ScriptedWorld.create(tmp_path, owner_uid=owner)
    await world.start_coordinator()
    assert world.coordinator
    engine = world.coordinator.engine
    engine.post(events.GangSubmitted("g1", 1, owner, "train", events.GangSpec(2, 1), "{}"))
    engine.post(events.NodeAttached("n2", "boot", "i", "192.0.2.7:7071", ("192.0.2.7",)))
    agent = ScriptedAgent(hello.pop("node", "n1"), spec(), world.credentials, **hello)
    await agent.open()
    refusal = await _refusal(agent.attach(world.address))
    await agent.die()
    await world.close()
    words = _stranger(agent.hello.slurm_job_id, agent.hello.gang_id)
    assert refusal == (grpc.StatusCode.PERMISSION_DENIED, words)
    assert agent.dismissed == ""


async def test_an_agent_of_another_users_gang_is_rejected(world: ScriptedWorld) -> None:
    assert world.coordinator
    owner = os.getuid() + 1
    world.coordinator.engine.post(events.GangSubmitted("g1", 1, owner, "train", events.GangSpec(2, 1), "{}"))
    agent = ScriptedAgent("n1", spec(), world.credentials)
    await agent.open()
    refusal = await _refusal(agent.attach(world.address))
    await agent.die()
    assert refusal == (grpc.StatusCode.PERMISSION_DENIED, _stranger(1, "g1"))


class AskedForFlags(FakeSlurm):
    """Notes for which jobs every flag is asked."""

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__(cluster)
        self.in_doubt = set[int]()

    async def jobs(self, ids: Any = None, **given: Any) -> JobAnswers | Unknown:
        self.in_doubt.update(given.get("in_doubt", ()))
        return await super().jobs(ids, **given)


async def test_slurm_is_asked_for_every_flag_of_a_job_that_may_stand_still(tmp_path: Path) -> None:
    """pyslurm alone does not show that its user has stopped it."""
    world = ScriptedWorld.create(tmp_path)
    world.slurm = slurm = AskedForFlags(world.cluster)
    await world.start_coordinator()
    await _running(world)
    assert world.coordinator
    assert slurm.in_doubt == set()
    world.coordinator.engine.core.observed.gang("g1").suspended_jobs = {1}
    await world.coordinator._watch.poll_jobs()
    assert slurm.in_doubt == {1}
    await world.close()


class TakenMeanwhile(FakeSlurm):
    """Does not say what its topology is, so an agent waits after it was checked. Then somebody registers a gang."""

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__(cluster)
        self.register: Callable[[], object] = lambda: None
        self._registered = asyncio.Event()

    async def jobs(self, ids: Any = None, **given: Any) -> JobAnswers | Unknown:
        if ids and 1 in ids:
            asyncio.get_running_loop().call_later(0.2, self._take)
        return await super().jobs(ids, **given)

    def _take(self) -> None:
        self.register()
        self._registered.set()

    async def topologies(self, **given: Any) -> tuple[SlurmTopology, ...] | Unknown:
        await self._registered.wait()
        return await super().topologies(**given)


@pytest.mark.parametrize("of_other_user", [True, False])
async def test_an_id_that_names_no_owner_is_taken_while_its_agent_is_checked(
    tmp_path: Path, of_other_user: bool
) -> None:
    """The attack: Slurm shows the id of a job of an earlier version. Its agent is bound to whatever gang is there."""
    world = ScriptedWorld.create(tmp_path)
    world.slurm = slurm = TakenMeanwhile(world.cluster)
    await world.start_coordinator()
    assert world.coordinator
    engine, owner = world.coordinator.engine, os.getuid() + of_other_user
    submitted = events.GangSubmitted("g1", 2, owner, "theirs", events.GangSpec(2, 1), "{}")
    slurm.register = lambda: engine.post(submitted)
    agent = ScriptedAgent("n1", spec(), world.credentials)
    await agent.open()
    try:
        async with asyncio.timeout(DEADLINE_S):
            if of_other_user:
                words = (grpc.StatusCode.PERMISSION_DENIED, _stranger(1, "g1"))
                assert await _refusal(agent.attach(world.address)) == words
            else:
                await agent.attach(world.address)
                assert agent.dismissed.startswith("gang g1 belongs to job 2, not to job 1")
        assert not engine.core.state.gangs["g1"].roster.members
    finally:
        await agent.die()
        await world.close()


async def test_an_agent_calls_from_an_address_that_the_daemon_of_its_node_reports(world: ScriptedWorld) -> None:
    assert world.coordinator
    engine = world.coordinator.engine
    engine.post(events.NodeAttached("n1", "boot", "i", "192.0.2.7:7071", ("192.0.2.7", "198.51.100.7")))
    engine.post(events.NodeAttached("n2", "boot", "i", "127.0.0.1:7071", ("127.0.0.1", "198.51.100.8")))
    agent = ScriptedAgent("n1", spec(), world.credentials)
    await agent.open()
    refusal = await _refusal(agent.attach(world.address))
    await agent.die()
    words = "an agent of n1 calls from an address of n1 (192.0.2.7 198.51.100.7); this call is from 127.0.0.1"
    assert refusal == (grpc.StatusCode.PERMISSION_DENIED, words)
    await world.start_agents(["n2"])
    await world.wait_for_facts(facts.MemberJoined)


@dataclass(frozen=True)
class Advertised:
    """An agent of n1, whose daemon has reported two addresses, says where others reach it."""

    address: str
    admitted: bool

    def __str__(self) -> str:
        return self.address


ADVERTISED = [
    *(Advertised(address, True) for address in ("198.51.100.7:1", "[::ffff:198.51.100.7]:1", "n1:1", "N1:1")),
    *(
        Advertised(address, False)
        for address in ("192.0.2.9:1", "mgmt1:1", "n2:1", "n1.elsewhere.example:1", "[::1]:1")
    ),
    Advertised(f"{os.uname().nodename}:1", True),  # it runs on the coordinator's machine, and calls from loopback
]


@pytest.mark.parametrize("advertised", ADVERTISED, ids=str)
async def test_others_reach_an_agent_at_its_own_node_only(world: ScriptedWorld, advertised: Advertised) -> None:
    """The attack: an agent has its peers, and the coordinator, call any host."""
    assert world.coordinator
    engine = world.coordinator.engine
    engine.post(events.NodeAttached("n1", "boot", "i", "127.0.0.1:7071", ("127.0.0.1", "198.51.100.7")))
    agent = ScriptedAgent("n1", spec(), world.credentials)
    await agent.open()
    agent.hello.peer_address = advertised.address
    if advertised.admitted:
        attached = asyncio.create_task(agent.attach(world.address))
        await world.wait_for_facts(facts.MemberJoined)
        assert world.gang.roster.members["n1"].peer_address == advertised.address
        await agent.die()
        await asyncio.gather(attached, return_exceptions=True)
        return
    code, words = await _refusal(agent.attach(world.address))
    await agent.die()
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert words.startswith(
        "the peer_address of an agent of n1 is an address of n1 (127.0.0.1 198.51.100.7), or a name"
    )
    assert words.endswith(f"); {advertised.address} is none")
    assert not engine.core.state.gangs


async def test_the_stream_of_an_agent_ends_with_its_node_in_the_job_and_is_not_opened_again(
    world: ScriptedWorld,
) -> None:
    await _running(world)
    assert world.coordinator
    world.cluster.remove_node(1, "n2")
    await world.wait_for_facts(facts.MemberRemoved)
    assert world.coordinator.engine.streams.get("g1", "n2") is None
    again = ScriptedAgent("n2", spec(), world.credentials)
    await again.open()
    await again.attach(world.address)
    await again.die()
    assert again.dismissed == "node n2 does not belong to job 1 (any more)"
    assert "n2" not in world.coordinator.engine.core.state.nodes  # its health has not changed


@pytest.mark.parametrize(
    ("node", "job", "pool", "words"),
    [
        ("n9", 1, 0, "node n9 does not belong to job 1 (any more)"),
        ("n1", 1, 5, "no node of the pool is wanted any more"),
    ],
)
async def test_an_agent_that_does_not_belong_to_the_gang_is_dismissed(
    world: ScriptedWorld, node: str, job: int, pool: int, words: str
) -> None:
    agent = ScriptedAgent(node, spec(), world.credentials, job=job, pool=pool)
    await agent.open()
    await agent.attach(world.address)
    await agent.die()
    assert agent.dismissed == words


async def test_an_agent_of_a_known_gang_is_dismissed_once_slurm_has_forgotten_the_job(world: ScriptedWorld) -> None:
    assert world.coordinator
    engine = world.coordinator.engine
    engine.post(events.GangSubmitted("g1", 77, os.getuid(), "train", events.GangSpec(2, 1), "{}"))
    agent = ScriptedAgent("n1", spec(), world.credentials, job=77)
    await agent.open()
    await agent.attach(world.address)
    await agent.die()
    assert agent.dismissed == "Slurm has no job 77"


async def test_an_agent_with_an_overlong_name_is_rejected(world: ScriptedWorld) -> None:
    agent = ScriptedAgent("n1", spec(), world.credentials, incarnation="x" * 300)
    await agent.open()
    code, words = await _refusal(agent.attach(world.address))
    await agent.die()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words == "incarnation has 303 characters: 256 at most"


async def test_an_agent_of_an_earlier_run_of_the_job_is_dismissed(world: ScriptedWorld) -> None:
    world.cluster.requeue(1, (), None)
    assert world.cluster.jobs()[1].restart_count == 1
    agent = ScriptedAgent("n1", spec(), world.credentials)
    await agent.open()
    await agent.attach(world.address)
    await agent.die()
    assert "the run of this process has ended" in agent.dismissed
    assert agent.release.protocol, "otherwise the agent takes this coordinator for one of the oldest version"


async def test_agents_attach_to_a_restarted_coordinator_while_slurm_is_silent(world: ScriptedWorld) -> None:
    await _running(world)
    world.slurm.unavailable_reason = "slurmctld does not answer"
    await world.stop_coordinator()
    await world.start_coordinator()
    await world.agents["n1"].wait_until(lambda: world.agents["n1"].terms[-1] == 2)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])


async def test_an_impossible_spec_is_rejected(world: ScriptedWorld) -> None:
    agent = ScriptedAgent("n1", spec(nodes=0), world.credentials)
    await agent.open()
    code, words = await _refusal(agent.attach(world.address))
    await agent.die()
    assert (code, words) == (grpc.StatusCode.INVALID_ARGUMENT, "nodes = 0: a gang needs at least 1 node")


async def test_a_ping_is_answered(world: ScriptedWorld) -> None:
    await _running(world)
    heard = world.coordinator.engine.core.observed.gang("g1").agents["n1"]  # type: ignore[union-attr]
    before = heard.heard_at
    await world.agents["n1"].ping(7)
    await world.agents["n1"].wait_until(lambda: world.agents["n1"].pongs == [7])
    assert heard.heard_at > before


async def test_an_agent_that_attaches_again_replaces_its_stream(world: ScriptedWorld) -> None:
    await _running(world)
    await world.wait_for_duty("HOLD 1", ["n3"])
    agent, first = world.agents["n3"], _stream(world, "n3")
    heard = len(agent.terms)
    again = asyncio.create_task(agent.attach(world.address))
    await agent.wait_until(lambda: len(agent.terms) > heard)
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*world.streams_of("n3"))  # the first stream has ended, without an error
    assert _stream(world, "n3") is not first
    assert world.coordinator
    assert world.coordinator.engine.core.observed.gang("g1").is_attached("n3")
    assert agent.duty == "HOLD 1"
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)


def _stream(world: ScriptedWorld, node: str) -> AgentOutbox:
    assert world.coordinator
    stream = world.coordinator.engine.streams.get("g1", node)
    assert stream
    return stream


async def _ping_until(agent: ScriptedAgent, over: Callable[[], bool]) -> None:
    """Ping repeatedly. Each ping waits for the answer to the one before."""
    async with asyncio.timeout(DEADLINE_S):
        while not over():
            seq = len(agent.pongs)
            await agent.ping(seq)
            await agent.wait_until(lambda seq=seq: seq in agent.pongs)  # type: ignore[misc]


async def test_a_second_agent_on_a_node_is_dismissed_while_the_first_lives(world: ScriptedWorld) -> None:
    await _running(world)
    first, fenced = _stream(world, "n1"), await world.wait_for_facts(facts.GenerationFenced, 0)
    second = ScriptedAgent("n1", spec(), world.credentials, incarnation="b")
    await second.open()
    attaching = asyncio.create_task(second.attach(world.address))
    await _ping_until(world.agents["n1"], attaching.done)
    await second.die()
    assert second.dismissed == "another agent of this job runs on n1: incarnation n1-a; this agent is n1-b"
    assert _stream(world, "n1") is first
    assert await world.wait_for_facts(facts.GenerationFenced, 0) == fenced
    assert world.gang.newest.generation == 1


@pytest.mark.parametrize("first", ["ended", "mute"])
async def test_a_restarted_agent_may_attach(world: ScriptedWorld, first: str) -> None:
    await _running(world)
    agent = world.agents["n3"]
    if first == "ended":
        await agent.die()
    else:
        await agent.wait_until(lambda: agent.duty == "HOLD 1")
        await agent.ping(1)
        await agent.wait_until(lambda: agent.pongs == [1])  # all that it said before was heard
        _stream(world, "n3").heard_at -= SILENT_STREAM_S
    second = ScriptedAgent("n3", spec(), world.credentials, incarnation="b")
    await second.open()
    attaching = asyncio.create_task(second.attach(world.address))
    async with asyncio.timeout(DEADLINE_S):
        await second.wait_until(lambda: second.duty == "HOLD 1")
    assert _stream(world, "n3").incarnation == "n3-b"
    await second.die()
    await asyncio.gather(attaching, return_exceptions=True)


async def test_a_stream_is_heard_or_closed_or_silent() -> None:
    stream = AgentOutbox("g1", "n1", "a")
    for act, heard in ((stream.note_heard, True), (stream.close, False)):
        waiting = asyncio.create_task(stream.wait_until_heard())
        await asyncio.sleep(0)  # one turn of the loop: the task waits
        act()
        assert await waiting is heard
    silent = AgentOutbox("g1", "n1", "a")
    silent.heard_at -= SILENT_STREAM_S
    assert not await silent.wait_until_heard()


def _impossible_status() -> agent_pb2.AgentStatus:
    return agent_pb2.AgentStatus(ranks=[agent_pb2.RankStatus()] * 10_000)


async def test_a_status_is_converted_after_the_owner_is_known(world: ScriptedWorld) -> None:
    assert world.coordinator
    owner = os.getuid() + 1
    world.coordinator.engine.post(events.GangSubmitted("g1", 1, owner, "train", events.GangSpec(2, 1), "{}"))
    agent = ScriptedAgent("n1", spec(), world.credentials)
    agent.status = _impossible_status()
    await agent.open()
    code, _ = await _refusal(agent.attach(world.address))
    await agent.die()
    assert code is grpc.StatusCode.PERMISSION_DENIED


async def test_an_agent_with_an_impossible_status_is_rejected(world: ScriptedWorld) -> None:
    agent = ScriptedAgent("n1", spec(), world.credentials)
    agent.status = _impossible_status()
    await agent.open()
    refusal = await _refusal(agent.attach(world.address))
    await agent.die()
    assert refusal == (grpc.StatusCode.INVALID_ARGUMENT, "ranks has 10000 entries: 2048 at most")


async def test_an_impossible_status_ends_the_stream_of_an_attached_agent(world: ScriptedWorld) -> None:
    assert world.coordinator
    await _running(world)
    agent = world.agents["n1"]
    agent.status = _impossible_status()
    await agent.step(0)
    (stream,) = world.streams_of("n1")
    world.tasks.discard(stream)
    refusal = await _refusal(stream)
    assert refusal == (grpc.StatusCode.INVALID_ARGUMENT, "ranks has 10000 entries: 2048 at most")
    assert world.coordinator.engine.running


# -- node daemons ----------------------------------------------------------------------------------------------------


async def _attach_daemon(channel: grpc.aio.Channel, node: str = "n1") -> Any:
    """A call that the daemon of a node has opened."""
    hello = node_pb2.NodeMessage(hello=node_pb2.NodeHello(node=node, boot_id="b", incarnation="i"))
    stub: Any = node_pb2_grpc.NodeServiceStub(channel)
    call = stub.Attach(metadata=await credential_metadata(channel, _NODE_ATTACH, hello))
    await call.write(hello)
    return call


async def test_the_more_nodes_are_attached_the_more_time_they_are_given_to_return(world: ScriptedWorld) -> None:
    told = []
    async with AsyncExitStack() as open_channels, asyncio.timeout(DEADLINE_S):
        for node in ("n1", "n2", "n3"):
            channel = await open_channels.enter_async_context(open_channel(world.address, world.credentials))
            call = await _attach_daemon(channel, node)
            told.append((await call.read()).return_within_s)
    assert told == [RETURN_S_PER_NODE, 2 * RETURN_S_PER_NODE, 3 * RETURN_S_PER_NODE]


async def test_a_node_daemon_is_told_all_rules_of_the_policy_once(world: ScriptedWorld, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("[xid.codes]\n63 = { when = { count = 5, window_s = 9, clear_s = 99 } }\n")
    policy = world.settings["policy"] = Policy.load(tmp_path / "policy.toml")
    await world.stop_coordinator()
    await world.start_coordinator()
    async with open_channel(world.address, world.credentials) as channel:
        call = await _attach_daemon(channel)
        first = await call.read()
        await call.write(node_pb2.NodeMessage(heartbeat=node_pb2.Heartbeat(seq=5)))
        second = await call.read()
    rule = node_pb2.SignalRule(kind="xid", code=63, count=5, window_s=9, clear_s=99)
    assert rule in first.rules
    assert len(first.rules) == len(policy.rules())
    assert not second.rules


async def test_a_node_daemon_is_told_which_signals_are_unfit_once(world: ScriptedWorld) -> None:
    async with open_channel(world.address, world.credentials) as channel:
        call = await _attach_daemon(channel)
        first = await call.read()
        await call.write(node_pb2.NodeMessage(heartbeat=node_pb2.Heartbeat(seq=5)))
        second = await call.read()
    assert 79 in next(signals.codes for signals in first.unfit if signals.kind == "xid")
    assert not second.unfit


async def test_a_node_daemon_is_told_the_verdict_on_its_node(world: ScriptedWorld) -> None:
    await world.send_signal("n2", 79)
    await world.wait_for_slurm()
    async with open_channel(world.address, world.credentials) as channel:
        told = [await (await _attach_daemon(channel, node)).read() for node in ("n1", "n2")]
    assert [order.verdict for order in told] == ["", "UNFIT"]
    assert told[1].verdict_reason.startswith("Xid 79")


@pytest.mark.parametrize(
    ("before", "action", "words"),
    [
        ([31, 45], 2, "node reboot required, after the program met Xid 31: GPU memory page fault"),
        ([45, 13, 31], 7, "system reboot required, after the program met Xid 13: graphics engine exception"),
        ([45, 125, 137], 2, "node reboot required"),  # no program has caused it
        ([31], 1, "GPU reset required"),  # needs no boot
    ],
)
async def test_an_unfit_node_names_the_first_error_of_a_program_just_before(
    world: ScriptedWorld, before: list[int], action: int, words: str
) -> None:
    async with open_channel(world.address, world.credentials) as channel:
        call = await _attach_daemon(channel)
        await call.read()
        for kind, code in [*(("xid", code) for code in before), ("gpu-recovery", action)]:
            await call.write(node_pb2.NodeMessage(signal=node_pb2.Signal(kind=kind, code=code)))
        assert world.coordinator
        state = world.coordinator.engine.core.state
        async with asyncio.timeout(DEADLINE_S):
            while not (state.node("n1").reason or "n1" in state.correlated_faults):
                await call.write(node_pb2.NodeMessage(heartbeat=node_pb2.Heartbeat()))
                await call.read()
        fault = state.correlated_faults.get("n1")
        told = fault or state.node("n1")
        assert told.reason == f"GPU recovery action {action}: {words}"
        assert told.program_error == words.partition("the program met ")[2]


async def test_a_clock_that_is_wrong_is_said_in_the_log_and_changes_no_verdict(
    world: ScriptedWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the coordinator's own clock is the wrong one, every node says this."""
    caplog.set_level(logging.INFO)
    words = "this node's clock is 3600.0 s ahead of the coordinator's"
    async with open_channel(world.address, world.credentials) as channel:
        call = await _attach_daemon(channel)
        await call.read()
        await call.write(node_pb2.NodeMessage(signal=node_pb2.Signal(kind="host-clock", code=1, text=words)))
        async with asyncio.timeout(DEADLINE_S):
            while f"n1: host-clock 1: {words}" not in caplog.text:
                await call.write(node_pb2.NodeMessage(heartbeat=node_pb2.Heartbeat()))
                await call.read()
    assert world.coordinator
    assert world.coordinator.engine.core.state.node("n1").health is NodeHealth.FIT


async def test_a_signal_that_begins_and_ends_without_end_fills_no_journal(world: ScriptedWorld) -> None:
    """The attack: root of one node, or a broken sensor there, adds three records with each pair of messages."""
    async with open_channel(world.address, world.credentials) as channel:
        call = await _attach_daemon(channel)
        await call.read()
        for _ in range(4 * ENDS_AT_ONCE):
            for kind in ("gpu-throttle", "gpu-throttle-over"):
                await call.write(node_pb2.NodeMessage(signal=node_pb2.Signal(kind=kind, code=128, device="GPU 2")))
                await call.read()
        assert world.coordinator
        assert world.coordinator.engine.core.state.node("n1").health is NodeHealth.DEGRADED
    records = world.coordinator.engine.journal.history("", 0, 10_000)
    ends = [record for record in records if record.name == "PrecursorEnded"]
    assert ENDS_AT_ONCE <= len(ends) <= 2 * ENDS_AT_ONCE


async def test_a_node_daemon_is_asked_for_a_check_and_its_node_is_resumed(world: ScriptedWorld, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("[limits]\nresume_after_check = true\n")
    world.settings["policy"] = Policy.load(tmp_path / "policy.toml")
    await world.stop_coordinator()
    await world.start_coordinator()
    assert world.coordinator
    world.coordinator.engine.post(node_seen("n2", world.cluster.nodes()["n2"]))
    await world.send_signal("n2", 79)
    await world.wait_for_slurm()
    world.cluster.cancel(1)  # the job leaves the node
    world.coordinator.engine.post(node_seen("n2", world.cluster.nodes()["n2"]))
    passed = common_pb2.NodeCheck(outcome=common_pb2.CHECK_OUTCOME_PASSED, gflops=50)
    async with open_channel(world.address, world.credentials) as channel, asyncio.timeout(DEADLINE_S):
        call = await _attach_daemon(channel, "n2")
        wanted = (await call.read()).check
        while not wanted:
            await call.write(node_pb2.NodeMessage(heartbeat=node_pb2.Heartbeat()))
            wanted = (await call.read()).check
        while wanted:
            checked = node_pb2.RequestedCheck(request=wanted, check=passed)
            await call.write(node_pb2.NodeMessage(heartbeat=node_pb2.Heartbeat(checked=checked)))
            wanted = (await call.read()).check
    await world.wait_for_slurm()
    assert not world.cluster.nodes()["n2"].drained


async def test_heartbeats_are_answered_with_the_term_and_the_interval(world: ScriptedWorld) -> None:
    async with open_channel(world.address, world.credentials) as channel:
        call = await _attach_daemon(channel)
        first = await call.read()
        await call.write(node_pb2.NodeMessage(heartbeat=node_pb2.Heartbeat(seq=5)))
        second = await call.read()
        assert world.coordinator
        assert world.coordinator.engine.core.observed.node("n1").attached
    assert (first.term, first.heartbeat_s, second.seq) == (1, 5.0, 5)
    await world.wait_for_facts(facts.NodeRegistered)


async def test_a_daemon_is_told_which_gangs_no_longer_need_kept_memory(world: ScriptedWorld) -> None:
    assert world.coordinator
    core_spec = events.GangSpec(nodes=1, spares=0, min_nodes=1)
    world.coordinator.engine.post(events.GangSubmitted("ended", 9, 1000, "job", core_spec, "{}"))
    world.coordinator.engine.post(events.SlurmJobChanged("ended", 9, (), 0, "CANCELLED"))
    kept = [node_pb2.KeptGang(gang_id=gang, generation=1) for gang in ("ended", "nobody's")]
    async with open_channel(world.address, world.credentials) as channel:
        call = await _attach_daemon(channel)
        await call.read()
        await call.write(node_pb2.NodeMessage(heartbeat=node_pb2.Heartbeat(seq=5, kept=kept)))
        assert [gang.gang_id for gang in (await call.read()).over] == ["ended"]


async def test_a_daemon_that_keeps_more_gangs_than_a_node_can_is_rejected(world: ScriptedWorld) -> None:
    async with open_channel(world.address, world.credentials) as channel:
        call = await _attach_daemon(channel)
        await call.read()
        kept = [node_pb2.KeptGang(gang_id="g")] * 257
        await call.write(node_pb2.NodeMessage(heartbeat=node_pb2.Heartbeat(seq=5, kept=kept)))
        refusal = await _refusal(call.read())
    assert refusal == (grpc.StatusCode.INVALID_ARGUMENT, "kept has 257 entries: 256 at most")


async def test_a_daemon_that_calls_from_another_address_is_rejected(tmp_path: Path) -> None:
    async def elsewhere(name: str) -> set[str]:
        return {"192.0.2.7"}

    world = ScriptedWorld.create(tmp_path)
    await world.start_coordinator(resolve=elsewhere)
    code, words = await _refusal(world.send_signal("n1", 79))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "192.0.2.7" in words
    code, words = await _refusal(world.send_signal("nowhere", 79))
    assert words == "Slurm has no node nowhere: --node must be the node's name in slurm.conf"
    await world.close()


# -- users ----------------------------------------------------------------------------------------------------------


async def test_describe(world: ScriptedWorld, api: Any) -> None:
    await _running(world)
    await _both_keep(world, 3)
    await world.wait_for_facts(facts.FirstStep)
    async with asyncio.timeout(DEADLINE_S):
        async for view in api.Watch(REF):
            if view.step == 3 and view.committed.step == 3 and all(rank.step == 3 for rank in view.ranks):
                break
    view = await api.Describe(REF)
    assert (view.gang_id, view.phase, view.generation, view.waiting_for) == ("g1", "RUNNING", 1, "")
    assert [(r.rank, r.node, r.state, r.step) for r in view.ranks] == [(0, "n1", "running", 3), (1, "n2", "running", 3)]
    assert [(n.node, n.verdict, n.role, n.agent_attached) for n in view.nodes] == [
        ("n1", "FIT", "rank", True),
        ("n2", "FIT", "rank", True),
        ("n3", "FIT", "spare", True),
    ]
    assert all(0 <= n.heard_s_ago < DEADLINE_S for n in view.nodes)
    assert [gang.gang_id for gang in (await api.List(api_pb2.ListRequest())).gangs] == ["g1"]


async def test_attend_notes_the_batch_process_and_returns_the_view(world: ScriptedWorld, api: Any) -> None:
    await _running(world)
    assert world.coordinator
    seen = world.coordinator.engine.core.observed.gang("g1")
    assert seen.batch is None
    view = await api.Attend(api_pb2.BatchRef(gang_id="g1", slurm_job_id=1, slurm_restart_count=2))
    assert (view.gang_id, view.phase) == ("g1", "RUNNING")
    assert seen.batch is not None
    assert seen.batch.is_of(1, 2)
    assert world.coordinator.engine.core.state.gangs["g1"].slurm.restart_count == 0
    world.coordinator.engine.core.state.gangs["g1"].slurm.restart_count = 3
    heard_at = seen.batch.heard_at
    over = await api.Attend(api_pb2.BatchRef(gang_id="g1", slurm_job_id=1, slurm_restart_count=2))
    assert (over.phase, over.final, seen.batch.heard_at) == ("RUNNING", True, heard_at)
    unknown = api_pb2.BatchRef(gang_id="nobody")
    assert (await _refusal(api.Attend(unknown)))[0] is grpc.StatusCode.NOT_FOUND


async def test_attend_notes_nodes_of_the_job_on_which_srun_started_nothing(world: ScriptedWorld, api: Any) -> None:
    await _running(world)
    assert world.coordinator
    world.coordinator.engine.core.state.gangs["g1"].slurm.job_nodes = ("n1", "n2")
    told = api_pb2.BatchRef(gang_id="g1", slurm_job_id=1, unlaunched_nodes=["of another job", "n2", "n2"])
    told.failed_nodes.update({"n2": 7, "of another job": 1})
    await api.Attend(told)
    seen = world.coordinator.engine.core.observed.gang("g1").batch
    assert seen is not None
    assert seen.unlaunched == ("n2",)
    assert seen.failed == (("n2", 7),)


async def test_the_placement_of_a_job_says_that_its_nodes_split_segments(world: ScriptedWorld, api: Any) -> None:
    await _running(world)
    said = api_pb2.BatchRef(
        gang_id="g1", slurm_job_id=1, split_segments="--segment=2 was\nasked for, which splits 1 of 1"
    )
    assert (await api.Attend(said)).wider_groups == "--segment=2 was asked for, which splits 1 of 1"
    assert (await api.Describe(REF)).wider_groups == "--segment=2 was asked for, which splits 1 of 1"


async def test_a_batch_process_may_end_once_the_requeue_flag_is_off(world: ScriptedWorld, api: Any) -> None:
    await world.start_agents(NODES, max_failures=1)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    world.slurm.unavailable_reason = "slurmctld is away"
    for name in ("n1", "n2"):
        await world.agents[name].end_ranks(1)
    await world.wait_for_facts(facts.GangEnded)
    batch = api_pb2.BatchRef(gang_id="g1", slurm_job_id=1)
    assert ((await api.Describe(REF)).final, (await api.Attend(batch)).final) == (True, False)
    world.slurm.unavailable_reason = ""
    await world.wait_for_slurm()
    assert (await api.Attend(batch)).final


async def test_watch_ends_with_the_gang(world: ScriptedWorld, api: Any) -> None:
    await _running(world)
    phases = []

    async def watch() -> None:
        async for view in api.Watch(REF):
            phases.append(view.phase)

    watching = asyncio.create_task(watch())
    for name in ("n1", "n2"):
        await world.agents[name].end_ranks(0)
    async with asyncio.timeout(DEADLINE_S):
        await watching
    assert phases[-1] == "DONE"


async def test_a_gang_that_ends_while_a_view_is_sent_has_a_final_view() -> None:
    view, changes = api_pb2.GangView(phase="RUNNING"), Changes()
    seen = []
    async for one in changed_views(lambda: _copy(view), SharedView(changes, lambda: 0.0), _right(), lambda: True):
        seen.append((one.phase, one.final))
        view.phase, view.final = "DONE", True
        changes.changed.set()
    assert seen == [("RUNNING", False), ("DONE", True)]


def _right() -> LastingRight:
    """Of an owner, whom nobody asks."""
    return LastingRight(lambda: asyncio.sleep(0), lambda: None, 3600.0)


def _copy(view: api_pb2.GangView) -> api_pb2.GangView:
    return api_pb2.GangView.FromString(view.SerializeToString())


async def test_all_who_watch_a_gang_share_each_of_its_views() -> None:
    view, changes, made = api_pb2.GangView(), Changes(), 0

    def make() -> api_pb2.GangView:
        nonlocal made
        made += 1
        return _copy(view)

    shared = SharedView(changes, lambda: 0.0)
    watchers = [changed_views(make, shared, _right(), lambda: True) for _ in range(50)]
    assert {(await anext(watcher)).step for watcher in watchers} == {0}
    assert made == 50  # a new watcher has the view as it is now
    view.step = 1
    changes.changed.set()
    async with asyncio.timeout(DEADLINE_S):
        seen = await asyncio.gather(*(anext(watcher) for watcher in watchers))
    assert ({one.step for one in seen}, made) == ({1}, 51)


async def test_a_watcher_that_is_refused_takes_no_change_from_the_others() -> None:
    view, changes, refused = api_pb2.GangView(), Changes(), [resource_exhausted("too much to do")]

    def make() -> api_pb2.GangView:
        if view.final and refused:
            raise refused.pop()
        return _copy(view)

    shared = SharedView(changes, lambda: 0.0)
    watchers = [changed_views(make, shared, _right(), lambda: True) for _ in range(2)]
    for watcher in watchers:
        await anext(watcher)
    view.final = True
    changes.changed.set()
    async with asyncio.timeout(DEADLINE_S):
        first, second = await asyncio.gather(*(anext(watcher) for watcher in watchers), return_exceptions=True)
    assert isinstance(first, CallRefused)
    assert isinstance(second, api_pb2.GangView)


async def test_a_step_waits_for_its_turn_and_a_decision_does_not() -> None:
    view, changes, asked = api_pb2.GangView(), Changes(), asyncio.Event()

    def pause_s() -> float:
        asked.set()
        return 1e6

    watcher = changed_views(lambda: _copy(view), SharedView(changes, pause_s), _right(), lambda: True)
    await anext(watcher)
    coming = asyncio.ensure_future(anext(watcher))
    view.step = 1
    changes.changed.set()
    async with asyncio.timeout(DEADLINE_S):
        await asked.wait()
        assert not coming.done()
        view.phase = "RECOVERING"
        changes.decided.set()
        assert (await coming).phase == "RECOVERING"


async def test_views_come_less_often_the_more_they_cost_together() -> None:
    watched = WatchedGangs(GangSubscribers())
    assert watched.pause_s() == MIN_VIEW_INTERVAL_S
    with watched.watch("g1") as first, watched.watch("g2") as second, watched.watch("g2") as again:
        assert second is again
        first.spent_s, second.spent_s = 0.01, 0.03
        assert watched.pause_s() == pytest.approx(0.04 / WATCHERS_SHARE)
    assert watched.pause_s() == MIN_VIEW_INTERVAL_S


async def test_a_decision_wakes_those_who_watch_by_more_than_a_step(world: ScriptedWorld) -> None:
    await _running(world)
    assert world.coordinator
    with world.coordinator.engine.gang_subscribers.subscribe("g1") as changes:
        await world.agents["n1"].step(5)
        async with asyncio.timeout(DEADLINE_S):
            await changes.changed.wait()
        await world.agents["n1"].end_ranks(1)
        async with asyncio.timeout(DEADLINE_S):
            await changes.decided.wait()


async def test_describe_of_an_unknown_job(api: Any) -> None:
    code, words = await _refusal(api.Describe(api_pb2.GangRef(slurm_job_id=42)))
    assert code is grpc.StatusCode.NOT_FOUND
    assert words == (
        "Slurm job 42: no such job, or not yours. muster status --all lists your jobs, those of the last 7 days, too"
    )


async def test_a_task_of_an_array_is_named_as_slurm_names_it(world: ScriptedWorld, api: Any) -> None:
    await api.Register(api_pb2.RegisterRequest(gang_id="g1", slurm_job_id=1, spec=spec(array_task="9_1")))
    view = await api.Describe(api_pb2.GangRef(gang_id="9_1"))
    assert (view.gang_id, job_ids(view)) == ("g1", "9_1")
    code, words = await _refusal(api.Describe(api_pb2.GangRef(gang_id="9_2")))
    assert (code, words.partition(":")[0]) == (grpc.StatusCode.NOT_FOUND, "gang 9_2")
    wrong = api_pb2.RegisterRequest(gang_id="g2", slurm_job_id=1, spec=spec(array_task="nine"))
    assert await _refusal(api.Register(wrong)) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        'array_task must be the job id of an array and a task: "42_1"',
    )


async def test_the_id_of_an_array_names_all_its_tasks(world: ScriptedWorld, api: Any) -> None:
    """Slurm gives it to the last task, too."""
    for id, task in (("g1", "9_10"), ("g2", "9_2"), ("g3", "")):
        job = world.cluster.submit(JobRequest(nodes=1))
        await api.Register(api_pb2.RegisterRequest(gang_id=id, slurm_job_id=job, spec=spec(array_task=task)))
        if id == "g1":
            assert (await api.Describe(api_pb2.GangRef(slurm_job_id=9))).array_task == "9_10"
    reply = await api.List(api_pb2.ListRequest(array=9))
    assert {view.gang_id for view in reply.gangs} == {"g1", "g2"}
    words = "job 9 is an array: name one of its tasks: 9_2, 9_10"
    for call in (api.Describe, api.Cancel, api.Flush):
        assert await _refusal(call(api_pb2.GangRef(slurm_job_id=9))) == (grpc.StatusCode.INVALID_ARGUMENT, words)
    assert (await api.Describe(api_pb2.GangRef(gang_id="9_2"))).gang_id == "g2"


async def test_only_the_owner_of_the_job_may_register_a_gang(world: ScriptedWorld, api: Any) -> None:
    request = api_pb2.RegisterRequest(gang_id="g1", slurm_job_id=1, spec=spec())
    await api.Register(request)
    await api.Register(request)  # twice changes nothing
    assert [r.text for r in await world.wait_for_facts(facts.GangRegistered)] == [
        f"gang train is registered: job 1 of uid {os.getuid()}; nodes: 2, spares: 1, ranks per node: 1"
    ]
    gone = api_pb2.RegisterRequest(gang_id="g2", slurm_job_id=9, spec=spec())
    assert await _refusal(api.Register(gone)) == (
        grpc.StatusCode.NOT_FOUND,
        f"Slurm has no job 9, or it is not of uid {os.getuid()}",
    )


async def test_events_are_history_then_a_sentinel_then_live_events(world: ScriptedWorld, api: Any) -> None:
    await _running(world)
    names: list[str] = []
    live = asyncio.Event()

    async def follow() -> None:
        async for record in api.Events(api_pb2.EventsRequest(gang=REF, follow=True)):
            names.append("|" if record.sentinel else record.name)
            if record.sentinel:
                live.set()

    following = asyncio.create_task(follow())
    async with asyncio.timeout(DEADLINE_S):
        await live.wait()
    for name in ("n1", "n2"):
        await world.agents[name].end_ranks(0)
    async with asyncio.timeout(DEADLINE_S):
        await following
    past, _, rest = " ".join(names).partition(" | ")
    assert past.startswith("GangRegistered PhaseChanged MemberJoined")
    assert "GenerationStarted" in past
    assert rest.endswith("GangEnded")
    only_new = [r async for r in api.Events(api_pb2.EventsRequest(gang=REF, after=5))]
    assert only_new[0].position == 6
    assert only_new[-1].sentinel


@pytest.mark.parametrize("position", [1 << 63, (1 << 64) - 1])
async def test_a_position_that_no_journal_has_is_refused(world: ScriptedWorld, api: Any, position: int) -> None:
    await _running(world)
    asked = api.Events(api_pb2.EventsRequest(gang=REF, after=position))
    answers = (anext(aiter(asked)), api.NodeHistory(api_pb2.NodeHistoryRequest(node="n1", before=position)))
    for field, answer in zip(("after", "before"), answers, strict=True):
        code, words = await _refusal(answer)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert words == f"{field} is {position}: a position in the journal is {(1 << 63) - 1} at most"


async def test_the_largest_position_has_nothing_behind_it_and_all_before_it(world: ScriptedWorld, api: Any) -> None:
    await _running(world)
    largest = (1 << 63) - 1
    told = [r async for r in api.Events(api_pb2.EventsRequest(gang=REF, after=largest))]
    assert [record.sentinel for record in told] == [True]
    assert (await api.NodeHistory(api_pb2.NodeHistoryRequest(node="n1", before=largest))).records


async def test_events_of_a_forgotten_job_are_readable(world: ScriptedWorld, api: Any) -> None:
    assert world.coordinator
    engine = world.coordinator.engine
    engine.post(events.GangSubmitted("old", 7, os.getuid(), "old", events.GangSpec(1, 0), "{}"))
    engine.core.state.gangs.clear()
    for ref in (api_pb2.GangRef(gang_id="old"), api_pb2.GangRef(slurm_job_id=7)):
        told = [r async for r in api.Events(api_pb2.EventsRequest(gang=ref, follow=True))]
        assert [record.name for record in told] == ["GangRegistered", ""]
    assert (await _refusal(api.Describe(api_pb2.GangRef(gang_id="old"))))[0] is grpc.StatusCode.NOT_FOUND


async def test_cancel_ends_the_gang_and_the_job(world: ScriptedWorld, api: Any) -> None:
    await _running(world)
    reply = await api.Cancel(REF)
    assert reply.text.startswith("train (job 1) is CANCELLED")
    await world.wait_for_duty("EXIT 1", NODES)
    await world.wait_for_slurm()
    assert world.cluster.jobs()[1].state.value == "CANCELLED"
    assert (await api.Cancel(REF)).text == "nothing to cancel: train is CANCELLED"


async def test_cancel_says_what_is_lost_with_the_memory(world: ScriptedWorld, api: Any) -> None:
    await _training(world)
    await _seen(api, 3)
    text = (await api.Cancel(REF)).text
    assert "; 3 steps that only memory had are lost: with durable_dir in job.toml, muster flush 1 before" in text


async def test_cancel_counts_the_steps_since_the_newest_durable_checkpoint(world: ScriptedWorld, api: Any) -> None:
    await _training(world)
    await _seen(api, 3)
    assert world.coordinator
    gang, seen = world.gang, world.coordinator.engine.core.observed.gang(world.gang.id)
    durable = replace(gang, spec=replace(gang.spec, durable_dir="/shared/checkpoints"))
    none, newest, all_saved = (
        views.lost_at_end(replace(durable, checkpoint=replace(gang.checkpoint, durable_version=version)), seen)
        for version in (None, events.Version(0, 2), events.Version(1, 3))
    )
    assert none.startswith("3 steps that only memory had are lost: there is no durable checkpoint. muster flush 1")
    assert newest.startswith("1 step that only memory had is lost: the newest durable checkpoint is of step 2. muster")
    assert all_saved == ""


async def _both_keep(world: ScriptedWorld, step: int) -> None:
    for rank, name in enumerate(["n1", "n2"]):
        await world.agents[name].step(step)
        await world.agents[name].report_shards(1, step, [rank])


async def _seen(api: Any, step: int) -> None:
    """The coordinator knows that this step is committed."""
    async with asyncio.timeout(DEADLINE_S):
        async for view in api.Watch(REF):
            if (view.committed.step, view.step) == (step, step):
                return


async def _phase(api: Any, wanted: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async for view in api.Watch(REF):
            if view.phase == wanted:
                return


async def test_a_gang_that_is_not_running_can_not_be_flushed(world: ScriptedWorld, api: Any, tmp_path: Path) -> None:
    await world.start_agents(["n1"], durable_dir=str(tmp_path))
    await world.wait_for_facts(facts.MemberJoined)
    code, words = await _refusal(api.Flush(REF))
    assert code is grpc.StatusCode.ABORTED
    assert "the gang is GATHERING: a checkpoint can be requested only while the gang is RUNNING" in words


async def test_flush_writes_the_committed_version(world: ScriptedWorld, api: Any, tmp_path: Path) -> None:
    await world.start_agents(NODES, durable_dir=str(tmp_path))
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    await _phase(api, "RUNNING")
    code, words = await _refusal(api.Flush(REF))
    assert code is grpc.StatusCode.ABORTED
    assert "no version is committed in memory" in words
    await _both_keep(world, 3)
    await world.wait_for_facts(facts.FirstStep)
    await _seen(api, 3)
    assert (await api.Flush(REF)).serial == 1
    flushed = (await world.wait_for_facts(facts.FlushEnded))[0]
    assert flushed.text.startswith("flush 1 is complete: ")
    flush = next(order.flush for order in world.agents["n2"].orders if order.HasField("flush"))
    assert [(s.rank, s.node) for s in flush.sources] == [(0, "n1"), (1, "n2")]


async def _training(world: ScriptedWorld) -> None:
    """Both ranks have finished step 3, and keep it."""
    await _running(world)
    for rank, name in enumerate(["n1", "n2"]):
        await world.agents[name].step(3)
        await world.agents[name].report_shards(1, 3, [rank])
    await world.wait_for_facts(facts.FirstStep)


async def test_swap_asks_the_ranks_to_leave_at_the_end_of_a_step(world: ScriptedWorld, api: Any) -> None:
    await _training(world)
    reply = await api.Swap(api_pb2.SwapRequest(gang=REF, node="n2", reason="its fan is loud"))
    assert reply.text == "at the end of a step, a spare takes the place of n2 in train (job 1)"
    assert reply.generation == 1
    [planned] = await world.wait_for_facts(facts.SwapPlanned)
    user = pwd.getpwuid(os.getuid()).pw_name
    assert planned.text.startswith(f"planned swap: asked for by {user}: its fan is loud; the ranks finish a step")
    agent = world.agents["n2"]
    async with asyncio.timeout(DEADLINE_S):
        await agent.wait_until(lambda: bool(agent.orders[-1].planned_swap))
    assert await _refusal(api.Swap(api_pb2.SwapRequest(gang=REF, node="n1"))) == (
        grpc.StatusCode.ABORTED,
        f"a swap is under way: n2 is left (asked for by {user}: its fan is loud); try again when it is over",
    )


async def test_drain_has_slurm_drain_the_node_and_says_what_becomes_of_its_job(world: ScriptedWorld, api: Any) -> None:
    await _training(world)
    user = pwd.getpwuid(os.getuid()).pw_name
    request = api_pb2.DrainRequest(node="n2", reason="its fan is loud")
    reply = await api.Drain(request)
    assert reply.text == "Slurm is told to start nothing more on n2"
    assert list(reply.jobs) == ["job 1 (train): at the end of a step, a spare takes the place of n2"]
    await world.wait_for_facts(facts.SlurmCallSettled)
    assert world.slurm.cluster.nodes()["n2"].reason == f"muster: [user] {user}: its fan is loud"
    again = await api.Drain(request)
    assert again.text == f"nothing to drain: {user} drains n2: its fan is loud"
    [view] = [view for view in (await api.Nodes(api_pb2.ListRequest())).nodes if view.node == "n2"]
    assert view.reason.startswith(f"{user} drains n2: its fan is loud; no musterd was ever heard; ")


async def test_drain_of_a_spare_and_of_a_node_whose_job_has_no_other_spare(world: ScriptedWorld, api: Any) -> None:
    await _training(world)
    reply = await api.Drain(api_pb2.DrainRequest(node="n3", reason="its fan is loud"))
    assert list(reply.jobs) == ["job 1 (train): keeps n3 as a spare that takes a seat only if no other is left"]
    reply = await api.Drain(api_pb2.DrainRequest(node="n2", reason="its fan is loud"))
    [words] = reply.jobs
    assert words.startswith("job 1 (train): keeps its ranks on n2 until a spare can take its place (no spare is ready")


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ({"node": "n9", "reason": "old"}, grpc.StatusCode.NOT_FOUND, "n9 is no node of this cluster: see muster nodes"),
        ({"node": "n2"}, grpc.StatusCode.INVALID_ARGUMENT, "a drain needs a reason: Slurm shows it to everybody"),
    ],
    ids=["unknown", "no reason"],
)
async def test_a_wrong_request_for_a_drain_is_refused(
    world: ScriptedWorld, api: Any, given: dict[str, str], code: grpc.StatusCode, words: str
) -> None:
    await _running(world)
    assert await _refusal(api.Drain(api_pb2.DrainRequest(**given))) == (code, words)
    assert world.coordinator.engine.core.index.drained == set()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"node": "n9"}, "n9 is no node of job 1; name one of the nodes that carry its ranks: n1 n2"),
        ({"node": "n2", "reason": "x" * 201}, "the reason has 201 characters: 200 are allowed"),
        ({"node": "n2", "reason": "a\nb"}, "the reason has characters that can't be printed"),
    ],
    ids=["another node", "long", "two lines"],
)
async def test_a_wrong_request_for_a_swap_is_refused(
    world: ScriptedWorld, api: Any, given: dict[str, str], words: str
) -> None:
    await _training(world)
    code, said = await _refusal(api.Swap(api_pb2.SwapRequest(gang=REF, **given)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert said.startswith(words)
    assert world.gang.plans.swap is None


@pytest.mark.parametrize("letter", ["x", "\u4e2d", "\x1b"])
async def test_a_refusal_that_quotes_a_long_name_reaches_its_caller(
    world: ScriptedWorld, api: Any, letter: str
) -> None:
    """A client of gRPC refuses long headers. It said "Stream removed" in place of the reason."""
    await _training(world)
    name = letter * 20_000
    for call in (
        api.Swap(api_pb2.SwapRequest(gang=REF, node=name)),
        api.Drain(api_pb2.DrainRequest(node=name, reason="its fan is loud")),
        api.Describe(api_pb2.GangRef(gang_id=name)),
    ):
        code, said = await _refusal(call)
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        assert len(said) < 1000
        assert "\x1b" not in said


async def test_nodes_lists_the_roll_call(world: ScriptedWorld, api: Any) -> None:
    assert world.coordinator
    await world.send_signal("n2", 79)
    await world.wait_for_slurm()
    await world.coordinator.roster.refresh()
    reply = await api.Nodes(api_pb2.ListRequest())
    assert [(n.node, n.verdict) for n in reply.nodes] == [("n1", "UNHEARD"), ("n2", "UNFIT"), ("n3", "UNHEARD")]
    assert reply.nodes[0].reason == "no musterd was ever heard; in service in Slurm (ALLOCATED)"
    assert (reply.nodes[0].heard_s_ago, reply.slurm_unknown) == (-1.0, "")
    assert world.cluster.nodes()["n2"].drained


async def test_nodes_says_that_an_operator_has_drained_a_node_with_scontrol(world: ScriptedWorld, api: Any) -> None:
    assert world.coordinator
    await world.send_signal("n1", 13)  # its daemon is heard
    for drain, down, words in (
        (events.SlurmDrain("fan is loud", idle=False), False, "drained in Slurm: fan is loud"),
        (events.SlurmDrain("", idle=True), False, "drained in Slurm"),
        (None, True, "DOWN in Slurm"),
        (None, False, ""),
    ):
        event = events.SlurmNodeChanged("n1", drain is None and not down, "", down=down, drain=drain)
        world.coordinator.engine.post(event)
        shown = {view.node: view for view in (await api.Nodes(api_pb2.ListRequest())).nodes}
        assert (shown["n1"].verdict, shown["n1"].reason) == ("FIT", words)


@pytest.mark.parametrize(
    ("power", "words"),
    [
        (NodeState.POWERED_DOWN, "powered down by Slurm"),
        (NodeState.POWERING_DOWN, "powered down by Slurm"),
        (NodeState.POWERING_UP, "Slurm powers it up"),
    ],
)
async def test_nodes_says_that_slurm_has_powered_a_node_down(
    world: ScriptedWorld, api: Any, power: NodeState, words: str
) -> None:
    assert world.coordinator
    await world.send_signal("n1", 13)  # its daemon was heard
    await world.coordinator.roster.refresh()
    world.coordinator.roster.nodes = {"n1": Node("n1", frozenset({NodeState.IDLE, power}))}
    shown = {view.node: view for view in (await api.Nodes(api_pb2.ListRequest())).nodes}
    assert (shown["n1"].verdict, shown["n1"].reason) == ("FIT", words)


async def test_nodes_names_the_lemons_of_the_sites_policy(world: ScriptedWorld, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("[limits]\nlemon_after = 1\n")
    world.settings["policy"] = Policy.load(tmp_path / "policy.toml")
    await world.stop_coordinator()
    await world.start_coordinator()
    await world.send_signal("n1", 13)
    await world.send_signal("n2", 79)
    await world.wait_for_slurm()
    async with open_channel(world.address, world.credentials) as channel:
        nodes = (await api_pb2_grpc.MusterStub(channel).Nodes(api_pb2.ListRequest())).nodes
    shown = {node.node: (node.failures, node.lemon) for node in nodes}
    assert (shown["n1"], shown["n2"]) == ((0, False), (1, True))


async def test_a_node_whose_daemon_was_heard_before_a_restart_is_not_unheard(world: ScriptedWorld, api: Any) -> None:
    await world.send_signal("n2", 13)
    await world.stop_coordinator()
    await world.start_coordinator()
    assert world.coordinator
    await world.coordinator.roster.refresh()
    async with open_channel(world.address, world.credentials) as channel:
        nodes = (await api_pb2_grpc.MusterStub(channel).Nodes(api_pb2.ListRequest())).nodes
    assert [(n.node, n.verdict) for n in nodes] == [("n1", "UNHEARD"), ("n2", "FIT"), ("n3", "UNHEARD")]


async def test_the_roll_call_has_leaves_and_jobs(world: ScriptedWorld, api: Any) -> None:
    assert world.coordinator
    await _running(world)
    world.cluster.leaves = {"n1": "s0", "n2": "s1"}
    other = events.GangSubmitted("other", 5, os.getuid() + 1, "other", events.GangSpec(1, 0), "{}")
    for event in (
        other,
        events.SlurmJobChanged("other", 5, ("n3",), 0, None),
        events.SlurmJobChanged("g1", 1, NODES, 0, None),
    ):
        world.coordinator.engine.post(event)
    await world.coordinator.roster.refresh()
    await world.coordinator.fabric.read()
    nodes = (await api.Nodes(api_pb2.ListRequest())).nodes
    assert [(n.node, n.leaf, list(n.slurm_job_ids)) for n in nodes] == [
        ("n1", "s0", [1]),
        ("n2", "s1", [1]),
        ("n3", "", [1, 5]),
    ]
    world.coordinator.engine.post(events.SlurmJobChanged("other", 5, (), 0, "CANCELLED"))
    nodes = (await api.Nodes(api_pb2.ListRequest())).nodes
    assert list(nodes[2].slurm_job_ids) == [1]


async def test_a_roll_call_while_slurm_is_silent_says_that_nodes_are_missing(tmp_path: Path) -> None:
    world = ScriptedWorld.create(tmp_path)
    world.slurm.unavailable_reason = "slurmctld is away"
    await world.start_coordinator()
    assert world.coordinator
    await world.coordinator.roster.refresh()
    async with open_channel(world.address, world.credentials) as channel:
        reply = await api_pb2_grpc.MusterStub(channel).Nodes(api_pb2.ListRequest())
    assert (list(reply.nodes), reply.slurm_unknown) == ([], "slurmctld is away")
    await world.close()


async def test_health_and_reflection_need_no_credential(world: ScriptedWorld) -> None:
    async with grpc.aio.insecure_channel(world.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "muster.v1.Muster"):
            reply = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        mirror = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = await anext(aiter(mirror.ServerReflectionInfo(iter([asked]))))
        names = {service.name for service in answer.list_services_response.service}
        assert {"muster.v1.Muster", "muster.v1.AgentService", "muster.v1.NodeService"} <= names


async def test_a_coordinator_that_can_not_write_its_journal_stops(tmp_path: Path) -> None:
    class Full(Journal):
        def append(self, facts: Any, at: float, cause: str) -> Any:
            raise JournalError("can't write the journal: database or disk is full")

    world = ScriptedWorld.create(tmp_path)
    await world.start_coordinator(Full(world.folder))
    assert world.coordinator
    world.coordinator.engine.post(events.GangSubmitted("g", 1, 0, "x", events.GangSpec(1, 0), "{}"))
    with pytest.raises(JournalError, match="disk is full"):
        async with asyncio.timeout(DEADLINE_S):
            await world.coordinator.wait()
    assert not world.coordinator.engine.running
    await world.close()


def test_the_wire_has_a_value_for_every_silence() -> None:
    words = {value for value in agent_pb2.Silence.values() if value}
    assert len(words) == len(events.Silence)


# -- streams that a cut link leaves open -----------------------------------------------------------------------------


async def test_the_stream_of_a_lost_node_is_closed_without_an_event(world: ScriptedWorld) -> None:
    await _running(world)
    assert world.coordinator
    engine = world.coordinator.engine
    for name in ("n1", "n3"):
        world.agents[name].unreachable["n2"] = agent_pb2.SILENCE_NO_ANSWER
    await world.agents["n2"].stop_answering()  # its stream stays open: nothing is heard, nothing is closed
    await world.agents["n1"].accuse("n2", agent_pb2.SILENCE_NO_ANSWER)
    await world.wait_for_facts(facts.MemberRemoved)
    assert engine.streams.get("g1", "n2") is None
    await world.wait_for_duty("RUN 2", ["n1", "n3"])
    assert engine.core.state.node("n2").health is NodeHealth.FIT  # only agents found it silent: it never had a daemon
    assert "coordinator" not in engine.core.observed.gang("g1").closed_by.get("n2", set())
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*world.streams_of("n2"))  # heals: the stream has ended there too
    assert world.agents["n2"].duty == "EXIT 1"


async def test_a_node_daemon_that_attaches_again_replaces_its_stream(world: ScriptedWorld) -> None:
    async with open_channel(world.address, world.credentials) as channel:
        first = await _attach_daemon(channel)
        await first.read()
        second = await _attach_daemon(channel)
        await second.read()
        async with asyncio.timeout(DEADLINE_S):
            assert await first.read() is grpc.aio.EOF
        assert world.coordinator
        assert world.coordinator.engine.core.observed.node("n1").attached


# -- the engine's own clock ------------------------------------------------------------------------------------------


class Skipping(SteadyClock):
    """A clock that jumps ahead by a minute at its second reading, as in a suspended process."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.jumped = asyncio.Event()

    def now(self) -> float:
        self.looks += 1
        if self.looks > 3:
            self.jumped.set()
        return super().now() + (60.0 if self.looks > 1 else 0.0)


async def test_a_coordinator_that_was_suspended_calls_no_node_lost(tmp_path: Path) -> None:
    world = ScriptedWorld.create(tmp_path)
    await world.start_coordinator()
    assert world.coordinator
    engine = world.coordinator.engine
    before = engine.core.observed.observing_since
    engine.clock = clock = Skipping()
    async with asyncio.timeout(DEADLINE_S):
        await clock.jumped.wait()
    assert engine.core.observed.observing_since >= before + 59.0
    await world.close()


class Clocks:
    """The wall clock and the monotonic clock of a machine."""

    def __init__(self) -> None:
        self.wall, self.monotonic = 1_000_000.0, 50.0

    def steady(self, not_before: float = 0.0) -> SteadyClock:
        return SteadyClock(not_before, lambda: self.wall, lambda: self.monotonic)


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_setting_the_wall_clock_does_not_move_the_steady_clock(step: float) -> None:
    clocks = Clocks()
    steady = clocks.steady()
    assert steady.now() == 1_000_000.0
    clocks.wall += step
    clocks.monotonic += 2.0
    assert steady.now() == 1_000_002.0
    assert steady.ahead_s() == 2.0 - step


def test_the_clock_never_goes_back_behind_the_journal() -> None:
    steady = Clocks().steady(not_before=1_001_000.0)
    assert steady.now() == 1_001_000.0
    assert steady.ahead_s() == 1000.0
