"""AgentService: one stream for the life of an agent.

An agent is checked when it attaches: the credential's uid owns the Slurm job, the node belongs to the job, the run of
the job is the newest, the call comes from an address of the node, and others reach the agent at one of the node, too
(`peer_address`). An agent that the journal knows is not checked with Slurm again, so agents attach to a restarted
coordinator although Slurm is down. After the check, the stream waits for nothing but the network and the limits of
`stream_reading`. It ends when the node leaves the job (core/detection/departure.py), and with a status that has
impossible values.

A second agent of the same job on the same node is dismissed while the first one lives: each would replace the other,
and each replacement ends a generation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from dataclasses import replace

import grpc
import grpc.aio

from muster import compatibility
from muster.daemon.coordinator.core.detection import circuit_breaker
from muster.daemon.coordinator.core.recovery.growth import shared_pool
from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.durable_state import Node
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.services import conversion, registration
from muster.daemon.coordinator.services.caller_limits import CallerLog, FactRate
from muster.daemon.coordinator.services.hello import CertificateIssuer, check_hello, check_peer_address
from muster.daemon.coordinator.services.job_specs import SpecWork, own_nodes, submitted
from muster.daemon.coordinator.services.rpc_errors import (
    invalid_argument,
    permission_denied,
    resource_exhausted,
    run_has_ended,
    unavailable,
)
from muster.daemon.coordinator.services.stream_reading import read_messages
from muster.daemon.coordinator.shell.agent_streams import AgentOutbox
from muster.daemon.coordinator.shell.engine import Engine
from muster.daemon.coordinator.slurm.fabric_watch import FabricWatch
from muster.daemon.coordinator.slurm.local_slurm import LocalSlurm
from muster.daemon.coordinator.slurm.lookup import SlurmLookup
from muster.daemon.host import clock
from muster.daemon.transport import call_binding
from muster.daemon.transport.authority import Authority
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.calls.call_messages import write_message
from muster.daemon.transport.calls.call_places import admitted_call, current_place
from muster.daemon.transport.calls.call_refused import CallRefused
from muster.daemon.transport.channel import raise_unexpected_error
from muster.daemon.transport.fencing_timeouts import FENCING_TIMEOUTS_S
from muster.daemon.transport.identity import Caller, current_caller, current_method
from muster.daemon.transport.server_limits import StreamLimits
from muster.fabric.sources.node_reports import NodeReport
from muster.node_health import OUT_OF_SERVICE
from muster.slurm.client import names
from muster.slurm.client.types import Gone, Job, Slurm, Unknown
from muster.v1 import agent_pb2 as pb
from muster.v1 import agent_pb2_grpc
from muster.v1.common_pb2 import Release

FABRIC_VALID_S = 5.0
"""Seconds for which the network is believed to be as it was read, when a new agent attaches."""
_log = logging.getLogger(__name__)
_Context = grpc.aio.ServicerContext[pb.AgentMessage, pb.CoordinatorMessage]


class AgentDismissed(Exception):
    """The agent must end: the coordinator will never have an order for it. The message is sent to the agent."""


class AgentService(agent_pb2_grpc.AgentServiceServicer):
    """The servicer. Every message of an agent becomes an event of `engine`."""

    def __init__(
        self,
        engine: Engine,
        lookup: SlurmLookup,
        fabric: FabricWatch,
        slurm: Slurm,
        rights: Rights,
        stream_limits: StreamLimits,
        issuing: Authority | None = None,
    ) -> None:
        """`issuing` issues the certificates of agents; None: connections are plain text."""
        self._certificates = CertificateIssuer(issuing)
        self._stream_limits = stream_limits
        self._rights = rights
        self._engine = engine
        self._slurm = slurm
        self._lookup = lookup
        self._fabric = fabric
        self._attach_rate = FactRate()
        self._caller_log = CallerLog(_log)
        self._specs = SpecWork()
        self._side = compatibility.own_side("the coordinator", FENCING_TIMEOUTS_S)
        self._release = compatibility.to_wire(self._side)

    async def Attach(  # type: ignore[override]  # grpc-stubs know no coroutine that writes its stream itself
        self, request_iterator: AsyncIterator[pb.AgentMessage], context: _Context
    ) -> None:
        """See agent.proto."""
        try:
            hello = await _read_hello(request_iterator)
        except CallRefused as error:
            await error.end_call(context)
        try:
            leaf = await self._admit(hello)
            hello = _without_spec(hello)
            status = await _read_status(request_iterator)
            self._register(hello, current_caller(), None)
            await self._wait_for_earlier_agent(hello)
            self._limit_new_agents(hello)
            certificate = self._certificate(hello)
        except CallRefused as error:
            self._log(logging.WARNING, hello, f"is rejected: {error}")
            await error.end_call(context)
        except AgentDismissed as reason:
            self._log(logging.INFO, hello, f"is dismissed: {reason}")
            await write_message(
                context, self._message(dismissed=str(reason), release=self._release), self._stream_limits.unread_s
            )
            return
        try:
            with admitted_call((hello.gang_id, hello.node)):
                if certificate:
                    await write_message(context, self._message(certificate=certificate), self._stream_limits.unread_s)
                # Only now: to convert a status costs more than to receive it.
                misfit = self._misfit(hello)
                first_status = _with_misfit(conversion.status(status, self._members(hello.gang_id)), misfit)
                await self._serve(hello, first_status, leaf, request_iterator, context, misfit)
        except conversion.InvalidMessage as error:
            self._log(logging.WARNING, hello, f"loses its stream: {error}")
            await invalid_argument(str(error)).end_call(context)
        except CallRefused as error:
            self._log(logging.WARNING, hello, f"loses its stream: {error}")
            await error.end_call(context)

    def _log(self, level: int, hello: pb.AgentHello, what: str) -> None:
        self._caller_log.log(level, current_caller().uid, f"{hello.gang_id}: the agent on {hello.node} {what}")

    async def _admit(self, hello: pb.AgentHello) -> str:
        """Check that the agent may attach, and register its gang. Returns the leaf switch of its node.

        Raises:
            CallRefused: the agent has no right to attach, or Slurm doesn't answer.
            AgentDismissed: the agent must end.
        """
        caller = current_caller()
        if isinstance(self._slurm, LocalSlurm):
            self._slurm.add_node(hello.slurm_job_id, hello.node, caller.uid)
        gang = self._engine.core.state.gangs.get(hello.gang_id)
        may_be_stranger = gang is None or not self._is_owner(caller, gang.account.owner_uid)
        if may_be_stranger:
            gang = await self._check_stranger(hello, caller)
        if gang:
            self._check_gang(caller, gang, hello)
        else:
            registration.check_id_is_for(hello.gang_id, caller.uid)
            self._check_job_is_free(hello, caller.uid)
        self._check_address(caller, self._engine.core.state.node(hello.node))
        _check_pool(gang, hello)
        _check_node_in_service(self._engine.core.state.node(hello.node), hello)
        if gang and not may_be_stranger and not _is_known(gang, hello):
            await self._check_job(hello, caller, owns_gang=True)
        member = gang.roster.members.get(hello.node) if gang else None
        known = member.peer_address if member else ""
        node = self._engine.core.state.node(hello.node)
        await check_peer_address(hello.peer_address, caller, node, self._lookup, known)
        if not member:
            await self._fabric.wait_until_known(FABRIC_VALID_S)
        if not gang or gang.spec.awaits_launch:
            self._register(hello, caller, await submitted(self._specs, hello, caller.uid))
        return member.leaf if member else self._engine.core.observed.leaf(hello.node)

    def _report(self, hello: pb.AgentHello) -> NodeReport:
        """What the agent's node has: the word of the node's daemon, which is root, counts for more."""
        seen = self._engine.core.observed.nodes.get(hello.node)
        return seen.report if seen and seen.report else NodeReport(nvlink_domain=hello.nvlink_domain)

    def _misfit(self, hello: pb.AgentHello) -> str:
        """Why an agent of this version carries no ranks; empty: it may."""
        reason = compatibility.misfit(self._side, compatibility.read(f"the agent on {hello.node}", hello.release))
        if reason:
            self._caller_log.log(logging.ERROR, current_caller().uid, f"{hello.gang_id}: {reason}")
        return reason or ""

    def _certificate(self, hello: pb.AgentHello) -> pb.Certificate | None:
        """What the agent's server proves itself with; None: connections are plain text, or it has that already.

        Raises:
            CallRefused: hello has no usable key.
        """
        issued = self._certificates.issue(call_binding.name_of_agent(hello.gang_id, hello.node), hello)
        return pb.Certificate(certificate=issued, authorities=self._certificates.authorities) if issued else None

    def _is_owner(self, caller: Caller, owner_uid: int) -> bool:
        return self._rights.allows(current_method(), caller, owner_uid=owner_uid)

    async def _check_stranger(self, hello: pb.AgentHello, caller: Caller) -> Gang | None:
        """Check an agent that no gang proves to be its owner's. Returns the gang that it names, if there is one now.

        A stranger gets the same refusal whether the job and the gang exist or not, and Slurm is asked in each case.
        """
        await self._check_job(hello, caller, owns_gang=False)
        gang = self._engine.core.state.gangs.get(hello.gang_id)
        if gang and not self._is_owner(caller, gang.account.owner_uid):
            raise _not_the_owner(hello, caller)
        return gang

    def _check_gang(self, caller: Caller, gang: Gang, hello: pb.AgentHello) -> None:
        of_other_job = not hello.pool_serial and hello.slurm_job_id != gang.slurm.job
        if not self._rights.allows(
            current_method(), caller, owner_uid=gang.account.owner_uid, of_other_job=of_other_job
        ):
            raise AgentDismissed(
                f"gang {gang.id} belongs to job {gang.slurm.job}, not to job {hello.slurm_job_id}: "
                "submit the job again with muster submit"
            )
        if hello.slurm_restart_count < gang.slurm.restart_count:
            raise AgentDismissed(run_has_ended(gang.slurm.job, gang.slurm.restart_count))

    def _check_address(self, caller: Caller, node: Node) -> None:
        if not self._rights.calls_from_node(caller, node.addresses):
            raise permission_denied(
                f"an agent of {node.name} calls from an address of {node.name} ({' '.join(node.addresses)}); "
                f"this call is from {caller.address}"
            )

    async def _wait_for_earlier_agent(self, hello: pb.AgentHello) -> None:
        """Wait until no other agent of this run of the job can be alive on this node.

        Raises:
            AgentDismissed: another agent is alive: it has sent a message since this call began.
        """
        while other := self._other_stream(hello):
            if await other.wait_until_heard():
                raise AgentDismissed(
                    f"another agent of this job runs on {hello.node}: incarnation {other.incarnation}; "
                    f"this agent is {hello.incarnation}"
                )
            if self._other_stream(hello) is other:
                return  # the other agent is gone; a cut link left its stream open

    def _limit_new_agents(self, hello: pb.AgentHello) -> None:
        """Count the agent, unless it is the member that the journal knows: each new agent is a record of the journal.

        Raises:
            CallRefused: too many new agents of this gang and node, or too many records of the gang or of its owner.
        """
        gang = self._engine.core.state.gangs.get(hello.gang_id)
        if gang and _is_known(gang, hello) and gang.roster.members[hello.node].incarnation == hello.incarnation:
            return
        limits, now = self._engine.limits, self._engine.clock.now()
        if gang and (refused := circuit_breaker.too_many_records(self._engine.core.state, gang.account, limits, now)):
            raise resource_exhausted(f"no new agent may join: {refused}")
        what = f"the agent of {hello.gang_id} on {hello.node}"
        self._attach_rate.note((hello.gang_id, hello.node), what, clock.monotonic())

    def _other_stream(self, hello: pb.AgentHello) -> AgentOutbox | None:
        """The stream of another incarnation of this agent in the same run of the job."""
        stream = self._engine.streams.get(hello.gang_id, hello.node)
        if (
            stream is None
            or stream.incarnation == hello.incarnation
            or stream.restart_count != hello.slurm_restart_count
        ):
            return None
        return stream

    def _register(self, hello: pb.AgentHello, caller: Caller, event: events.GangSubmitted | None) -> None:
        """Register the gang, unless it is registered: an agent may attach before `muster submit` registers the gang.
        The first agent of a user's own script brings the whole spec.

        The checks before have waited for Slurm, or for the status (`event` is None then). Meanwhile another user, or
        another job, may have registered an id that names no owner. Nothing waits between the last check and the first
        event of the agent but agents of this gang.
        """
        gangs, uid = self._engine.core.state.gangs, caller.uid
        if gang := gangs.get(hello.gang_id):
            if not self._is_owner(caller, gang.account.owner_uid):
                raise _not_the_owner(hello, caller)
            self._check_gang(caller, gang, hello)
            if event is None or not gang.spec.awaits_launch:
                return
        self._check_job_is_free(hello, uid)
        if event is None:
            raise unavailable(f"the gang {hello.gang_id} is gone: attach again")
        limits, now = self._engine.limits, self._engine.clock.now()
        others = [other for other in gangs.values() if other.id != hello.gang_id]
        registration.check_budget(others, uid, len(event.spec_json), limits, now)
        self._engine.post(event)

    def _check_job_is_free(self, hello: pb.AgentHello, uid: int) -> None:
        gangs = self._engine.core.state.gangs.values()
        try:
            registration.check_job_is_free(gangs, hello.gang_id, hello.slurm_job_id, uid)
        except CallRefused as error:
            raise AgentDismissed(str(error)) from None

    async def _check_job(self, hello: pb.AgentHello, caller: Caller, *, owns_gang: bool) -> None:
        called_at = clock.monotonic()
        try:
            found = await self._lookup.job(hello.slurm_job_id, caller.uid)
            self._check_job_answer(found, hello, caller, owns_gang)
        except (AgentDismissed, CallRefused):
            # The answer may be older than the job's last change: ask again.
            found = await self._lookup.job(hello.slurm_job_id, caller.uid, since=called_at)
            self._check_job_answer(found, hello, caller, owns_gang)

    def _check_job_answer(
        self, found: Job | Gone | Unknown, hello: pb.AgentHello, caller: Caller, owns_gang: bool
    ) -> None:
        match found:
            case Unknown():
                raise unavailable(f"can't get job {hello.slurm_job_id} from Slurm: {found.reason}")
            case Gone() if owns_gang:
                raise AgentDismissed(f"Slurm has no job {hello.slurm_job_id}")
            case Job() if self._is_owner(caller, found.user_id):
                _check_run(found, hello)
            case _:
                raise _not_the_owner(hello, caller)

    async def _serve(
        self,
        hello: pb.AgentHello,
        status: events.AgentStatus,
        leaf: str,
        messages: AsyncIterator[pb.AgentMessage],
        context: _Context,
        misfit: str,
    ) -> None:
        stream = AgentOutbox(hello.gang_id, hello.node, hello.incarnation, hello.slurm_restart_count, misfit)
        self._engine.streams.add(stream)
        writer = asyncio.create_task(_send(stream, self._release, context, self._stream_limits.unread_s))
        try:
            self._engine.post(_attached(hello, status, leaf, self._report(hello)))
            if self._engine.running:
                self._engine.send_order(stream)
            await _wait_for_either(asyncio.create_task(self._receive(stream, messages)), writer)
        finally:
            stream.close()
            if self._engine.streams.remove(stream):
                self._engine.post(events.AgentDisconnected(stream.gang, stream.node, stream.incarnation))

    async def _receive(self, stream: AgentOutbox, messages: AsyncIterator[pb.AgentMessage]) -> None:
        async for message in read_messages(messages, self._stream_limits):
            stream.note_heard()
            if message.HasField("ping"):
                stream.put(self._message(pong=message.ping))
            if event := self._event(stream, message):
                self._engine.post(event)

    def _event(self, stream: AgentOutbox, message: pb.AgentMessage) -> events.Event | None:
        match message.WhichOneof("body"):
            case "status":
                members = self._members(stream.gang)
                status = _with_misfit(conversion.status(message.status, members), stream.misfit)
                self._engine.links.note_transfers(stream.gang, stream.node, message.status.transfers, members)
                return events.AgentReported(stream.gang, stream.node, stream.incarnation, status)
            case "ping":
                return events.AgentHeartbeat(stream.gang, stream.node)
            case "accusation":
                accused = message.accusation
                conversion.check_name(names.check_node, accused.node)
                return events.PeerAccused(stream.gang, stream.node, accused.node, conversion.silence(accused.silence))
            case "probe_result":
                result = message.probe_result
                conversion.check_name(names.check_node, result.node)
                silence = None if result.answered else conversion.silence(result.silence)
                return events.ProbeAnswered(
                    stream.gang, result.probe_id, stream.node, result.node, silence, result.step
                )
            case "link_measurement":
                self._engine.links.note_measurement(stream.gang, stream.node, message.link_measurement)
                return None
            case _:
                return None  # a message of a newer agent, or a second hello

    def _members(self, gang: str) -> Collection[str]:
        """All nodes that the gang has or had."""
        known = self._engine.core.state.gangs.get(gang)
        return known.roster.members if known else ()

    def _message(self, **body: object) -> pb.CoordinatorMessage:
        return pb.CoordinatorMessage(term=self._engine.journal.term, **body)  # type: ignore[arg-type]


async def _read_hello(messages: AsyncIterator[pb.AgentMessage]) -> pb.AgentHello:
    first = await anext(messages, None)
    if first is None or not first.HasField("hello"):
        raise invalid_argument("the first message must be hello, the second one status")
    hello = first.hello
    if not hello.gang_id or not hello.node or not hello.incarnation or not hello.peer_address:
        raise invalid_argument("hello needs gang_id, node, incarnation and peer_address")
    try:
        check_hello(hello)
    except conversion.InvalidMessage as error:
        raise invalid_argument(str(error)) from None
    return hello


def _without_spec(hello: pb.AgentHello) -> pb.AgentHello:
    """Hello when its gang is registered. Agents whose hello waits for room would keep this one's status from being
    read. A copy: a message keeps the memory of a field that is cleared."""
    hello.ClearField("spec")
    kept = pb.AgentHello()
    kept.CopyFrom(hello)
    if place := current_place():
        place.hold_only(kept.ByteSize())
    return kept


async def _read_status(messages: AsyncIterator[pb.AgentMessage]) -> pb.AgentStatus:
    """The first status. Only who has the node gets so far: a status of 4 MiB takes 300 MiB once it is read."""
    second = await anext(messages, None)
    if second is None or not second.HasField("status"):
        raise invalid_argument("the second message must be status")
    return second.status


def _not_the_owner(hello: pb.AgentHello, caller: Caller) -> CallRefused:
    """The refusal of a stranger. It repeats what the agent has said, and tells nothing of jobs and gangs."""
    return permission_denied(
        f"uid {caller.uid} has no job {hello.slurm_job_id} with gang {hello.gang_id}: an agent attaches for a job and "
        "a gang of its own user"
    )


def _check_pool(gang: Gang | None, hello: pb.AgentHello) -> None:
    refusal = shared_pool.refusal(gang, hello.pool_serial, hello.slurm_job_id, hello.node) if hello.pool_serial else ""
    if refusal:
        raise AgentDismissed(refusal)


def _check_node_in_service(node: Node, hello: pb.AgentHello) -> None:
    if hello.pool_serial and node.health in OUT_OF_SERVICE:
        # Slurm allocates the node again, so an operator has resumed it: the watch on Slurm will see that soon.
        raise unavailable(f"{hello.node} is still {node.health} here: {node.reason}")


def _is_known(gang: Gang, hello: pb.AgentHello) -> bool:
    """The member attaches again, and nothing says that it has left the job since Slurm was asked about it."""
    member = gang.roster.members.get(hello.node)
    is_of_job = member is not None and not member.gone and member.job == hello.slurm_job_id
    return is_of_job and hello.slurm_restart_count == gang.slurm.restart_count


def _check_run(found: Job, hello: pb.AgentHello) -> None:
    if hello.slurm_restart_count < found.restart_count:
        raise AgentDismissed(run_has_ended(found.id, found.restart_count))
    if hello.node not in found.nodes:
        raise AgentDismissed(f"node {hello.node} does not belong to job {found.id} (any more)")


def _attached(hello: pb.AgentHello, status: events.AgentStatus, leaf: str, report: NodeReport) -> events.AgentAttached:
    return events.AgentAttached(
        gang=hello.gang_id,
        node=hello.node,
        job=hello.slurm_job_id,
        restart_count=hello.slurm_restart_count,
        incarnation=hello.incarnation,
        peer_address=hello.peer_address,
        batch_host=hello.batch_host,
        leaf=leaf,
        status=status,
        pool=hello.pool_serial,
        nvlink_domain=report.nvlink_domain,
        adapter_bandwidth=report.adapter_bandwidth,
        own_nodes=own_nodes(hello.spec),
    )


def _with_misfit(status: events.AgentStatus, misfit: str) -> events.AgentStatus:
    """An agent that does not fit carries no ranks: the core takes it out, or ends a gang of such agents."""
    return replace(status, failure=misfit) if misfit else status


async def _send(stream: AgentOutbox, release: Release | None, context: _Context, unread_s: float) -> None:
    """`release`: what this coordinator says of itself, with the first message."""
    while (message := await stream.next_message()) is not None:
        if release:
            said, message, release = message, pb.CoordinatorMessage(release=release), None
            message.MergeFrom(said)
        await write_message(context, message, unread_s)


async def _wait_for_either(reader: asyncio.Task[None], writer: asyncio.Task[None]) -> None:
    """Wait until the agent ends its side, or the stream was closed and all messages were sent."""
    try:
        await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        reader.cancel()
        writer.cancel()
        await asyncio.gather(reader, writer, return_exceptions=True)
    for task in (reader, writer):
        raise_unexpected_error(task)  # gRPC logs it, and the stream ends with an error
