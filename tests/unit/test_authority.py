"""Every cell of the authority table, tried on the real servers: each method by each kind of caller."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from muster.checkpoint.store.checkpoint_service import CheckpointService
from muster.checkpoint.testing.no_transport import NoTransport
from muster.daemon.agent.failure_detector.peers import AgentIdentity, PeerChannels, PeerService, make_agent_server
from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.durable_state import Node
from muster.daemon.coordinator.services.login_names import ReaderNames
from muster.daemon.node.daemon import make_probe_server
from muster.daemon.testing.chosen_users import ChosenUser
from muster.daemon.testing.scripted_world import DEADLINE_S, NODES, ScriptedWorld, spec
from muster.daemon.transport import call_binding
from muster.daemon.transport.authority_table import AUTHORITY, Answer, CallerKind
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.channel import bind, credential_metadata, make_server, open_channel
from muster.daemon.transport.identity import CredentialRefused, SecretCredentials, current_method
from muster.daemon.transport.management_hosts import ManagementHosts
from muster.daemon.transport.server_limits import COORDINATOR, agent_limits
from muster.slurm.client.fake.fake_slurm import FakeSlurm
from muster.slurm.client.types import NodeAnswers, Unknown
from muster.v1 import (
    agent_pb2,
    agent_pb2_grpc,
    api_pb2,
    api_pb2_grpc,
    common_pb2,
    common_pb2_grpc,
    diagnosis_pb2,
    diagnosis_pb2_grpc,
    goodput_pb2,
    goodput_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    peer_pb2,
    peer_pb2_grpc,
)

PROTOS = Path(__file__).resolve().parents[2] / "protos" / "muster" / "v1"
ROOT, SLURM, OPERATOR, OWNER, OTHER, ACCOUNT_COORDINATOR, READER = 0, 64030, 500, 1001, 1002, 1003, 1004
GROUPS = {READER: frozenset({"rita", "group:vision"})}
UIDS = {
    CallerKind.OTHER_USER: OTHER,
    CallerKind.OWNER: OWNER,
    CallerKind.OTHER_AGENT: OWNER,
    CallerKind.NODE_ROOT: ROOT,
    CallerKind.OPERATOR: OPERATOR,
    CallerKind.ACCOUNT_COORDINATOR: ACCOUNT_COORDINATOR,
    CallerKind.READER: READER,
}
JOB = api_pb2.GangRef(slurm_job_id=1)
VERSION = common_pb2.Version(generation=1, step=1)
# All calls of these tests come from this host. The scripted world resolves the names of all hosts to it.
THIS_HOST, ANOTHER_HOST = "mgmt1", "192.0.2.1"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a caller of this kind, on a channel to a server that has the job of `OWNER`."""

    kind: CallerKind
    method: str
    channel: grpc.aio.Channel
    credentials: ChosenUser | None

    async def metadata(self, first: Any) -> grpc.aio.Metadata | None:
        """For a bidirectional stream that begins with `first`: it proves its caller by itself."""
        return await credential_metadata(self.channel, self.method, first) if self.credentials else None

    @property
    def job(self) -> int:
        """The job that the caller belongs to, as far as a message says so."""
        return 2 if self.kind is CallerKind.OTHER_AGENT else 1

    @property
    def gang(self) -> str:
        """The gang that a peer names."""
        return "g2" if self.kind is CallerKind.OTHER_AGENT else "g1"

    @property
    def api(self) -> Any:
        return api_pb2_grpc.MusterStub(self.channel)

    @property
    def peer(self) -> Any:
        return peer_pb2_grpc.PeerServiceStub(self.channel)


async def _then_wait(*messages: Any) -> AsyncIterator[Any]:
    """The messages of a caller that keeps its stream open."""
    for message in messages:
        yield message
    await asyncio.get_running_loop().create_future()


# Each makes one call and returns whether the caller got what it wanted of the job. A refusal with a status raises.


async def _register(call: Call) -> bool:
    await call.api.Register(api_pb2.RegisterRequest(gang_id="g1", slurm_job_id=1, spec=spec()))
    return True


async def _describe(call: Call) -> bool:
    return bool((await call.api.Describe(JOB)).gang_id == "g1")


async def _attend(call: Call) -> bool:
    return bool((await call.api.Attend(api_pb2.BatchRef(gang_id="g1", slurm_job_id=1))).gang_id == "g1")


async def _watch(call: Call) -> bool:
    return bool((await anext(aiter(call.api.Watch(JOB)))).gang_id == "g1")


async def _list(call: Call) -> bool:
    return [view.gang_id for view in (await call.api.List(api_pb2.ListRequest())).gangs] == ["g1"]


async def _events(call: Call) -> bool:
    return "GangRegistered" in [record.name async for record in call.api.Events(api_pb2.EventsRequest(gang=JOB))]


async def _cancel(call: Call) -> bool:
    return "CANCELLED" in (await call.api.Cancel(JOB)).text


async def _flush(call: Call) -> bool:
    try:
        await call.api.Flush(JOB)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:  # the caller may, and this job can't
            raise
    return True


async def _swap(call: Call) -> bool:
    try:
        await call.api.Swap(api_pb2.SwapRequest(gang=JOB, node="n1"))
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:  # the caller may, and this job has no ranks yet
            raise
    return True


async def _drain(call: Call) -> bool:
    reply = await call.api.Drain(api_pb2.DrainRequest(node="n1", reason="its fan is loud"))
    return bool(reply.text)


async def _nodes(call: Call) -> bool:
    nodes = (await call.api.Nodes(api_pb2.ListRequest())).nodes
    assert {node.node for node in nodes} == set(NODES)
    return any(node.slurm_job_ids for node in nodes)


async def _node_history(call: Call) -> bool:
    node = (await call.api.NodeHistory(api_pb2.NodeHistoryRequest(node="n1"))).node
    assert node.node == "n1"
    return bool(node.slurm_job_ids)


async def _measurements(call: Call) -> bool:
    stub: Any = diagnosis_pb2_grpc.DiagnosisStub(call.channel)
    return bool((await stub.Measurements(JOB)).gang.gang_id == "g1")


async def _account(call: Call) -> bool:
    stub: Any = goodput_pb2_grpc.GoodputStub(call.channel)
    request = goodput_pb2.GoodputRequest(since_s=1, by=goodput_pb2.GOODPUT_GROUP_JOB)
    return bool([row async for page in stub.Account(request) for row in page.rows])  # the job waits in the queue


async def _measure_link(call: Call) -> bool:
    stub: Any = diagnosis_pb2_grpc.DiagnosisStub(call.channel)
    try:
        await stub.MeasureLink(diagnosis_pb2.MeasureLinkRequest(gang=JOB, from_node="n1", to_node="n2"))
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:  # the caller may, and this job has no agents yet
            raise
    return True


async def _attach_agent(call: Call) -> bool:
    hello = agent_pb2.AgentHello(
        gang_id="g1", slurm_job_id=call.job, node="n1", incarnation="i", peer_address="127.0.0.1:1", spec=spec()
    )
    first = agent_pb2.AgentMessage(hello=hello)
    messages = _then_wait(first, agent_pb2.AgentMessage(status=agent_pb2.AgentStatus()))
    stub: Any = agent_pb2_grpc.AgentServiceStub(call.channel)
    message = await anext(aiter(stub.Attach(messages, metadata=await call.metadata(first))))
    return bool(message.HasField("order"))  # or it is dismissed


async def _attach_node(call: Call) -> bool:
    hello = node_pb2.NodeMessage(hello=node_pb2.NodeHello(node="n1", boot_id="b", incarnation="i"))
    stub: Any = node_pb2_grpc.NodeServiceStub(call.channel)
    order = await anext(aiter(stub.Attach(_then_wait(hello), metadata=await call.metadata(hello))))
    return bool(order.term)


async def _link(call: Call) -> bool:
    ping = peer_pb2.LinkPing(gang_id=call.gang, node="n2", seq=7)
    pongs = call.peer.Link(_then_wait(ping), metadata=await call.metadata(ping))
    return bool((await anext(aiter(pongs))).seq == 7)


async def _offer(call: Call) -> bool:
    await call.peer.Offer(peer_pb2.ShardOffer(gang_id=call.gang, node="n2", version=VERSION))
    return True


async def _fetch(call: Call) -> bool:
    try:
        await anext(aiter(call.peer.Fetch(peer_pb2.FetchRequest(gang_id=call.gang, node="n2", version=VERSION))))
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:  # the caller may, and this agent has no shard
            raise
    return True


async def _stored(call: Call) -> bool:
    await call.peer.Stored(peer_pb2.StoredReport(gang_id=call.gang, node="n2", version=VERSION))
    return True


async def _committed(call: Call) -> bool:
    await call.peer.Committed(peer_pb2.CommitNotice(gang_id=call.gang, node="n2", version=VERSION))
    return True


async def _open_sink(call: Call) -> bool:
    reply = await call.peer.OpenSink(peer_pb2.SinkRequest(gang_id=call.gang, node="n2"))
    return bool(reply.refused == "n1 takes in no transfers")


async def _ping(call: Call) -> bool:
    reply = await common_pb2_grpc.ProbeServiceStub(call.channel).Ping(common_pb2.PingRequest(nonce="x"))
    return bool(reply.nonce == "x")


async def _check_health(call: Call) -> bool:
    reply = await health_pb2_grpc.HealthStub(call.channel).Check(health_pb2.HealthCheckRequest())
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def _list_health(call: Call) -> bool:
    try:
        await health_pb2_grpc.HealthStub(call.channel).List(health_pb2.HealthListRequest())
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:  # the caller may, and gRPC's service can't
            raise
    return True


async def _watch_health(call: Call) -> bool:
    stub: Any = health_pb2_grpc.HealthStub(call.channel)
    return bool(await anext(aiter(stub.Watch(health_pb2.HealthCheckRequest()))))


async def _reflect(call: Call) -> bool:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(call.channel)
    asked = _then_wait(reflection_pb2.ServerReflectionRequest(list_services=""))
    return bool(await anext(aiter(stub.ServerReflectionInfo(asked))))


class Served(NamedTuple):
    """A server: its address, and the name that its callers' credentials must name."""

    address: str
    name: str


AGENT = call_binding.name_of_agent("g1", "n1")


@asynccontextmanager
async def _coordinator(folder: Path, management_host: str) -> AsyncIterator[tuple[ChosenUser, list[Served]]]:
    """A coordinator that knows the job of `OWNER`. Yields credentials that it accepts, and its address."""
    world = ScriptedWorld.create(folder, owner_uid=OWNER)
    world.credentials = slurm = ChosenUser(SLURM)
    world.rights = Rights(frozenset({OPERATOR}), own_uid=SLURM, management_hosts=ManagementHosts([management_host]))
    world.settings["reader_names"] = ReaderNames(lambda uid: GROUPS.get(uid, frozenset({"somebody", "group:others"})))
    await world.start_coordinator()
    assert world.coordinator
    engine = world.coordinator.engine
    spec_of_gang = events.GangSpec(2, 1, readers=("nobody", "group:vision"))
    engine.post(events.GangSubmitted("g1", 1, OWNER, "train", spec_of_gang, "{}"))
    engine.post(events.SlurmJobChanged("g1", 1, NODES, 0, None))
    await world.coordinator.roster.refresh()
    yield slurm, [Served(world.address, "127.0.0.1")]
    await world.close()


@asynccontextmanager
async def _agent(folder: Path, management_host: str) -> AsyncIterator[tuple[ChosenUser, list[Served]]]:
    """The agent of gang g1 of `OWNER`, as far as peers meet it."""
    owner = ChosenUser(OWNER)
    async with AsyncExitStack() as stack:
        stub_for = PeerChannels(owner, "g1", plain_text=True).stub_for
        shards = CheckpointService("g1", "n1", stub_for, NoTransport(), lambda: None)
        stack.push_async_callback(shards.close)
        identity = AgentIdentity("g1", "n1", "i", OWNER)
        service = PeerService(identity, shards, lambda: None)
        server = make_agent_server(owner, agent_limits(members=2), identity, service)
        yield owner, [Served(await _start(server, stack), AGENT)]


@asynccontextmanager
async def _probed(folder: Path, management_host: str) -> AsyncIterator[tuple[ChosenUser, list[Served]]]:
    """Everything that answers probes: an agent and a musterd."""
    async with AsyncExitStack() as stack:
        owner, servers = await stack.enter_async_context(_agent(folder, management_host))
        musterd = await _start(make_probe_server(owner, "n1", "i"), stack)
        yield owner, [*servers, Served(musterd, call_binding.name_of_node_daemon("n1"))]


async def _start(server: grpc.aio.Server, stack: AsyncExitStack) -> str:
    port = bind(server, "127.0.0.1:0")
    await server.start()
    stack.push_async_callback(server.stop, None)
    return f"127.0.0.1:{port}"


MUSTER, PEER = "/muster.v1.Muster/", "/muster.v1.PeerService/"
HEALTH, REFLECTION = "/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/"
TRIED: dict[str, tuple[Callable[[Path, str], Any], Callable[[Call], Awaitable[bool]]]] = {
    f"{MUSTER}Register": (_coordinator, _register),
    f"{MUSTER}Describe": (_coordinator, _describe),
    f"{MUSTER}Attend": (_coordinator, _attend),
    f"{MUSTER}Watch": (_coordinator, _watch),
    f"{MUSTER}List": (_coordinator, _list),
    f"{MUSTER}Events": (_coordinator, _events),
    f"{MUSTER}Cancel": (_coordinator, _cancel),
    f"{MUSTER}Flush": (_coordinator, _flush),
    f"{MUSTER}Swap": (_coordinator, _swap),
    f"{MUSTER}Drain": (_coordinator, _drain),
    f"{MUSTER}Nodes": (_coordinator, _nodes),
    f"{MUSTER}NodeHistory": (_coordinator, _node_history),
    "/muster.v1.Diagnosis/Measurements": (_coordinator, _measurements),
    "/muster.v1.Diagnosis/MeasureLink": (_coordinator, _measure_link),
    "/muster.v1.Goodput/Account": (_coordinator, _account),
    "/muster.v1.AgentService/Attach": (_coordinator, _attach_agent),
    "/muster.v1.NodeService/Attach": (_coordinator, _attach_node),
    f"{PEER}Link": (_agent, _link),
    f"{PEER}Offer": (_agent, _offer),
    f"{PEER}Fetch": (_agent, _fetch),
    f"{PEER}Stored": (_agent, _stored),
    f"{PEER}Committed": (_agent, _committed),
    f"{PEER}OpenSink": (_agent, _open_sink),
    "/muster.v1.ProbeService/Ping": (_probed, _ping),
    f"{HEALTH}Check": (_coordinator, _check_health),
    f"{HEALTH}List": (_coordinator, _list_health),
    f"{HEALTH}Watch": (_coordinator, _watch_health),
    f"{REFLECTION}ServerReflectionInfo": (_coordinator, _reflect),
}
"""By method: a server that offers it, and a call."""


@asynccontextmanager
async def _calling(kind: CallerKind, method: str, user: ChosenUser, served: Served) -> AsyncIterator[Call]:
    if kind is CallerKind.ANONYMOUS:
        async with grpc.aio.insecure_channel(served.address) as channel:
            yield Call(kind, method, channel, None)
        return
    credentials = user.as_uid(UIDS[kind])
    async with open_channel(served.address, credentials, server=served.name) as channel:
        yield Call(kind, method, channel, credentials)


async def _result(call: Call, make: Callable[[Call], Awaitable[bool]]) -> tuple[str, bool]:
    """The status code, and whether the caller got what it wanted of the job."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return "OK", await make(call)
            except grpc.aio.AioRpcError as error:
                # grpc.aio says INTERNAL, for the status, if the call ends while its client still writes: ask again.
                if error.code() is not grpc.StatusCode.INTERNAL:
                    return error.code().name, False


@pytest.mark.parametrize("kind", CallerKind)
@pytest.mark.parametrize("method", AUTHORITY)
async def test_a_server_answers_as_the_table_says(method: str, kind: CallerKind, tmp_path: Path) -> None:
    serving, make = TRIED[method]
    answer = AUTHORITY[method][kind]
    management_host = ANOTHER_HOST if kind is CallerKind.NODE_ROOT else THIS_HOST
    async with serving(tmp_path, management_host) as (user, servers):
        for served in servers:
            async with _calling(kind, method, user, served) as call:
                assert await _result(call, make) == (answer.code, answer is Answer.ALLOWED)


def _methods_of(module: Any) -> Iterator[str]:
    for service in module.DESCRIPTOR.services_by_name.values():
        yield from (f"/{service.full_name}/{method.name}" for method in service.methods)


def test_every_method_has_a_row_and_every_row_a_method() -> None:
    # Every user of a node may call nvhcd's service, over a Unix socket and without a credential.
    stems = sorted({path.stem for path in PROTOS.glob("*.proto")} - {"nvhcd"})
    modules = [importlib.import_module(f"muster.v1.{stem}_pb2") for stem in stems]
    methods = [name for module in (*modules, health_pb2, reflection_pb2) for name in _methods_of(module)]
    assert sorted(AUTHORITY) == sorted(methods), "a row of daemon/transport/authority_table.py for each method"
    assert TRIED.keys() == AUTHORITY.keys()


async def test_a_method_without_a_row_is_refused_to_root(tmp_path: Path) -> None:
    handled: list[str] = []

    async def handle(request: bytes, context: Any) -> bytes:
        handled.append(current_method())
        return b""

    root = ChosenUser(ROOT)
    server = make_server(root, COORDINATOR)
    handler = grpc.unary_unary_rpc_method_handler(handle, bytes, bytes)
    server.add_registered_method_handlers("muster.v1.Muster", {"Format": handler, "List": handler})
    async with AsyncExitStack() as stack:
        address = await _start(server, stack)
        channel = await stack.enter_async_context(open_channel(address, root))
        await channel.unary_unary("/muster.v1.Muster/List")(b"")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/muster.v1.Muster/Format")(b"")
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert handled == ["/muster.v1.Muster/List"]


# -- what the table showed -------------------------------------------------------------------------------------------


class CountingSlurm(FakeSlurm):
    """Counts the questions about nodes."""

    questions = 0

    async def nodes(self, names: Any = None, **given: Any) -> NodeAnswers | Unknown:
        self.questions += names is not None
        return await super().nodes(names, **given)


@pytest.mark.parametrize("uid", [ROOT, SLURM, OPERATOR])
async def test_who_may_steer_all_jobs_may_steer_none_from_a_node(tmp_path: Path, uid: int) -> None:
    """A coordinator whose site names its management hosts. The calls come from another host: a compute node."""
    async with (
        _coordinator(tmp_path, ANOTHER_HOST) as (user, (served,)),
        open_channel(served.address, user.as_uid(uid)) as channel,
    ):
        cancel, events_of_all = api_pb2_grpc.MusterStub(channel).Cancel(JOB), _events_of_all(channel)
        for attack, code in ((cancel, grpc.StatusCode.NOT_FOUND), (events_of_all, grpc.StatusCode.PERMISSION_DENIED)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await attack
            assert refused.value.code() is code
            only = "(an operator's rights count on the site's management hosts only; this call is from 127.0.0.1)"
            assert str(refused.value.details()).endswith(only)


async def _events_of_all(channel: grpc.aio.Channel) -> None:
    async for _ in api_pb2_grpc.MusterStub(channel).Events(api_pb2.EventsRequest()):
        return


@pytest.mark.parametrize("uid", [OTHER, OPERATOR])
async def test_who_can_be_no_node_daemon_costs_slurm_no_question(tmp_path: Path, uid: int) -> None:
    world = ScriptedWorld.create(tmp_path, owner_uid=OWNER)
    world.slurm = slurm = CountingSlurm(world.cluster)
    world.credentials = ChosenUser(SLURM)
    world.rights = Rights(frozenset({OPERATOR}), own_uid=SLURM)
    await world.start_coordinator()
    user = world.credentials.as_uid(uid)
    async with open_channel(world.address, user) as channel:
        call = Call(CallerKind.OTHER_USER, "/muster.v1.NodeService/Attach", channel, user)
        assert await _result(call, _attach_node) == ("PERMISSION_DENIED", False)
    await world.close()
    assert slurm.questions == 0


async def test_an_agent_of_another_gang_at_a_peers_address_is_no_sign_of_life(tmp_path: Path) -> None:
    """The peer has ended, and an agent of the owner's other job has its port now."""
    async with (
        _agent(tmp_path, THIS_HOST) as (owner, (served,)),
        open_channel(served.address, owner, server=served.name) as channel,
    ):
        ping = peer_pb2.LinkPing(gang_id="g2", node="n2", seq=1)
        stub: Any = peer_pb2_grpc.PeerServiceStub(channel)
        call = stub.Link(metadata=await credential_metadata(channel, f"{PEER}Link", ping))
        await call.write(ping)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    assert refused.value.details() == "this agent belongs to gang g1, not g2"


async def test_an_agent_at_the_address_of_another_ends_its_calls(tmp_path: Path) -> None:
    """The other agent has ended. The caller's credential names it."""
    async with _agent(tmp_path, THIS_HOST) as (owner, (served,)):
        channels = PeerChannels(owner, "g1", plain_text=True)
        ping = peer_pb2.LinkPing(gang_id="g1", node="n3", seq=1)
        call = await channels.open_link("n2", served.address, ping)
        await call.write(ping)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        await channels.close()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


# -- the credentials of these tests ----------------------------------------------------------------------------------


def test_chosen_users_are_for_tests_only(tmp_path: Path) -> None:
    """Their tokens are worth nothing to the credentials that a site can choose, and no one else's to them."""
    user, site = ChosenUser(OTHER), SecretCredentials.create(tmp_path / "secret")
    for maker, checker in ((user, site), (site, user), (ChosenUser(ROOT), user)):
        with pytest.raises(CredentialRefused):
            checker.check(maker.issue("/m"))
    token = user.as_uid(OWNER).issue("/m")
    assert user.check(token) == (OWNER, OWNER, "/m")
    with pytest.raises(CredentialRefused):
        user.check(token)


@pytest.mark.parametrize(("uid", "readable"), [(OTHER, set()), (OWNER, {1}), (OPERATOR, {1, 5})])
async def test_a_node_check_is_shown_to_those_who_may_read_its_job(
    tmp_path: Path, uid: int, readable: set[int]
) -> None:
    """The attack: an agent's words about a node, and the job that it belongs to, are shown to every user."""
    world = ScriptedWorld.create(tmp_path, owner_uid=OWNER)
    world.credentials = slurm = ChosenUser(SLURM)
    world.rights = Rights(frozenset({OPERATOR}), own_uid=SLURM)
    world.settings["reader_names"] = ReaderNames(lambda uid: GROUPS.get(uid, frozenset({"somebody", "group:others"})))
    await world.start_coordinator()
    assert world.coordinator
    engine = world.coordinator.engine
    spec_of_gang = events.GangSpec(2, 1, readers=("nobody", "group:vision"))
    engine.post(events.GangSubmitted("g1", 1, OWNER, "train", spec_of_gang, "{}"))
    engine.post(events.SlurmJobChanged("g1", 1, NODES, 0, None))
    for name, job in (("n1", 1), ("n2", 5)):
        check = events.NodeCheck(events.CheckOutcome.PASSED, "said by an owner")
        engine.core.state.nodes[name] = Node(name, check=check, checked_in_job=job, checked_at=1.0)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(world.close)
        api: Any = api_pb2_grpc.MusterStub(
            await stack.enter_async_context(open_channel(world.address, slurm.as_uid(uid)))
        )
        assert _checks((await api.Nodes(api_pb2.ListRequest())).nodes) == readable
        if uid != OTHER:
            assert _checks((await api.Describe(JOB)).nodes) == {1}


def _checks(nodes: Iterable[api_pb2.NodeView]) -> set[int]:
    """The jobs of which the views show node checks."""
    assert all(node.HasField("node_check") == bool(node.checked_in_job) == bool(node.checked_s) for node in nodes)
    return {node.checked_in_job for node in nodes if node.checked_in_job}
