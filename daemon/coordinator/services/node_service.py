"""NodeService: one stream for the life of a node daemon. It carries heartbeats and hardware signals.

The server reads no message of a caller who can be no node daemon (`Rights.refusal`). So only root can make the
coordinator look up a node, or resolve a name.

A node daemon is root and calls from the address that Slurm has for its node. While Slurm doesn't answer, the address in
the journal counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace

import grpc.aio

from muster import compatibility
from muster.daemon.coordinator.core.detection.hardware_signals import PRECURSORS_KEPT
from muster.daemon.coordinator.core.recovery.restore_plan import memory_is_obsolete
from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.policy.policy import OVER, Policy, SignalDecision
from muster.daemon.coordinator.services import conversion
from muster.daemon.coordinator.services.caller_limits import AttachQueue, CallerLog, FactRate
from muster.daemon.coordinator.services.hello import CertificateIssuer, check_hello
from muster.daemon.coordinator.services.rpc_errors import (
    failed_precondition,
    invalid_argument,
    permission_denied,
    unavailable,
)
from muster.daemon.coordinator.services.stream_reading import read_messages
from muster.daemon.coordinator.shell.engine import Engine
from muster.daemon.coordinator.slurm.lookup import SlurmLookup
from muster.daemon.host import clock
from muster.daemon.host.name_resolution import NameUnresolved
from muster.daemon.host.plain_text import cut
from muster.daemon.transport import call_binding, job_limits
from muster.daemon.transport.authority import Authority
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.calls.call_messages import write_message
from muster.daemon.transport.calls.call_refused import CallRefused
from muster.daemon.transport.channel import raise_unexpected_error
from muster.daemon.transport.identity import current_caller, current_method
from muster.daemon.transport.management_hosts import Resolve
from muster.daemon.transport.server_limits import StreamLimits
from muster.node_health import NodeHealth
from muster.slurm.client.types import Gone, Node, Unknown
from muster.v1 import node_pb2 as pb
from muster.v1 import node_pb2_grpc

_log = logging.getLogger(__name__)
_Context = grpc.aio.ServicerContext[pb.NodeMessage, pb.NodeOrder]

RETURN_S_PER_NODE = 0.004
"""Seconds that each node adds to the time within which all nodes are asked to return after a restart: 50 s for 12,500.
To attach one node costs 3 ms of processor time (measured). The heartbeats of the other nodes come on top."""
FOLLOW_UP_S = 10.0
"""Seconds after an error of a program within which the driver gives a node up because of it. It takes milliseconds."""
_BOOTS = (2, 7)
"""GPU recovery actions that only a boot of the node ends."""
SILENT_HEARTBEATS = 4
"""Heartbeats that a daemon may miss before its stream ends, whatever the interval is."""

ENDS_AT_ONCE, END_INTERVAL_S = 2 * PRECURSORS_KEPT, 30.0
"""Signals of one node that may end at once, and seconds after which one more may. All precursors that are kept of a
node may end every ten minutes, for ever: the shipped policy calls most of them over after so long."""


class NodeService(node_pb2_grpc.NodeServiceServicer):
    """The servicer. `heartbeat_s`: the heartbeat interval, in seconds, that every daemon is told."""

    def __init__(
        self,
        engine: Engine,
        lookup: SlurmLookup,
        policy: Policy,
        rights: Rights,
        stream_limits: StreamLimits,
        *,
        heartbeat_s: float,
        resolve: Resolve,
        issuing: Authority | None = None,
        on_signal: Callable[[str, int, str], None] = lambda kind, code, action: None,
    ) -> None:
        """`issuing` issues the certificates of node daemons; None: connections are plain text. `on_signal` is told the
        kind and code of each signal, and the action that follows."""
        self.driver_lines: dict[str, pb.DriverLines] = {}
        """For each node that has said it: the lines of drivers that were not understood."""
        self._on_signal = on_signal
        self._certificates = CertificateIssuer(issuing)
        self._rights = rights
        silent_s = max(stream_limits.silent_s, SILENT_HEARTBEATS * heartbeat_s)
        self._stream_limits = replace(stream_limits, silent_s=silent_s)
        self._engine = engine
        self._resolve = resolve
        self._lookup = lookup
        self._policy = policy
        self._rules = [conversion.signal_rule(rule) for rule in policy.rules()]
        self._unfit = [conversion.unfit_signals(signals) for signals in policy.unfit_signals()]
        self._attach_rate = FactRate()
        self._end_rate = FactRate(ENDS_AT_ONCE, END_INTERVAL_S)
        self._caller_log = CallerLog(_log)
        self._turns = AttachQueue()
        self._heartbeat_s = heartbeat_s
        self._side = compatibility.own_side("the coordinator")
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._program_errors: dict[str, tuple[float, str]] = {}
        """For each node: the first error of a program in a row of them, and when the newest came."""

    async def Attach(  # type: ignore[override]  # grpc-stubs know no coroutine that writes its stream itself
        self, request_iterator: AsyncIterator[pb.NodeMessage], context: _Context
    ) -> None:
        """See node.proto."""
        try:
            hello = await _read_hello(request_iterator)
            await self._admit(hello)
            self._check_version(hello)
            await self._turns.wait()
            self._limit_new_registrations(hello)
            certificate = self._certificates.issue(call_binding.name_of_node_daemon(hello.node), hello)
        except CallRefused as error:
            self._caller_log.log(
                logging.WARNING, current_caller().uid, f"a node daemon at {context.peer()} is rejected: {error}"
            )
            await error.end_call(context)
        serving = asyncio.create_task(self._serve(hello, certificate, request_iterator, context))
        if before := self._streams.get(hello.node):
            before.cancel()  # a cut link may have left the earlier stream open
        self._streams[hello.node] = serving
        try:
            await asyncio.gather(serving, return_exceptions=True)
            raise_unexpected_error(serving)  # gRPC logs it, and the stream ends with an error
        except CallRefused as error:
            self._caller_log.log(
                logging.WARNING, hello.node, f"the stream of the node daemon on {hello.node} ends: {error}"
            )
            await error.end_call(context)
        finally:
            serving.cancel()
            if self._streams.get(hello.node) is serving:
                del self._streams[hello.node]
                self._engine.post(events.NodeDisconnected(hello.node, hello.incarnation))

    async def _serve(
        self, hello: pb.NodeHello, certificate: bytes, messages: AsyncIterator[pb.NodeMessage], context: _Context
    ) -> None:
        self._engine.post(_attached(hello, current_caller().address))
        self.driver_lines.pop(hello.node, None)  # a daemon that has started anew counts from 0
        self._post_hardware(hello.node, hello)
        release = compatibility.to_wire(self._side)
        first = pb.NodeOrder(certificate=certificate, rules=self._rules, unfit=self._unfit, release=release)
        await self._answer(context, hello.node, first)
        async for message in read_messages(messages, self._stream_limits):
            await self._check_size(message.heartbeat, context)
            seq = self._post_message(hello.node, message)
            over = self._unneeded_memory(message.heartbeat.kept)
            await self._answer(context, hello.node, pb.NodeOrder(seq=seq, over=over))

    async def _check_size(self, heartbeat: pb.Heartbeat, context: _Context) -> None:
        """End the call of a daemon that keeps more gangs than a node can."""
        try:
            conversion.check_count("kept", len(heartbeat.kept), job_limits.MAX_KEPT_GANGS)
        except conversion.InvalidMessage as error:
            await invalid_argument(str(error)).end_call(context)

    async def _answer(self, context: _Context, node: str, order: pb.NodeOrder) -> None:
        """Send the order, with what every order holds. It confirms the newest message: the daemon then forgets the
        signal that the message carried.

        A message is confirmed only while the engine runs: an engine that has stopped did not write the signal to the
        journal. The stream ends instead, and the daemon sends the signal again to the next coordinator.
        """
        if not self._engine.running:
            await unavailable("the coordinator is stopping: it did not process the last message").end_call(context)
        order.term = self._engine.journal.term
        order.heartbeat_s = self._heartbeat_s
        order.now_s = clock.wall()
        order.return_within_s = RETURN_S_PER_NODE * len(self._streams)
        order.check = self._wanted_check(node)
        known = self._engine.core.state.nodes.get(node)
        if known is not None and known.health is not NodeHealth.FIT:
            order.verdict, order.verdict_reason = known.health.value, known.reason
        await write_message(context, order, self._stream_limits.unread_s)

    def _unneeded_memory(self, kept: Iterable[pb.KeptGang]) -> list[pb.KeptGang]:
        gangs = self._engine.core.state.gangs
        return [memory for memory in kept if memory_is_obsolete(gangs.get(memory.gang_id), memory.generation)]

    def _post_message(self, node: str, message: pb.NodeMessage) -> int:
        """Post the event of a daemon's message. Returns the sequence number to confirm; 0 for none."""
        if message.HasField("heartbeat"):
            self._engine.post(events.NodeHeartbeat(node))
            self._post_check(node, message.heartbeat)
            self._note_driver_lines(node, message.heartbeat)
            return message.heartbeat.seq
        self._post_hardware(node, message)
        if message.HasField("signal"):
            event = self._signal_event(node, conversion.signal(message.signal))
            if event.signal_action != "over" or not self._ends_too_many(event):
                self._engine.post(event)
        return 0

    def _post_hardware(self, node: str, message: pb.NodeHello | pb.NodeMessage) -> None:
        """Post what the node has, if the message says it. A report that no node can send is logged and left out: the
        node's signals count for more."""
        if not message.HasField("hardware"):
            return
        try:
            self._engine.post(events.NodeHardwareReported(node, conversion.node_report(message.hardware)))
        except conversion.InvalidMessage as error:
            self._caller_log.log(logging.WARNING, node, f"the daemon of {node}: {error}")

    def _ends_too_many(self, event: events.NodeSignalled) -> bool:
        """Whether the node says too often that a signal is over. Each end lets the signal begin again, which writes
        facts: without a bound, root of one node could fill the coordinator's disk. The node stays DEGRADED instead."""
        precursors = self._engine.core.state.node(event.node).precursors
        if event.signal not in precursors or not self._end_rate.is_too_often(event.node, clock.monotonic()):
            return False
        words = f"{event.node}: too many signals have ended: the node stays DEGRADED ({event.reason})"
        self._caller_log.log(logging.WARNING, event.node, words)
        return True

    def _post_check(self, node: str, heartbeat: pb.Heartbeat) -> None:
        """Post what a check has found that is still asked for."""
        checked = heartbeat.checked
        found = conversion.node_check(checked.check)
        if found is not None and checked.request and checked.request == self._wanted_check(node):
            self._engine.post(events.NodeCheckReported(node, checked.request, found))

    def _note_driver_lines(self, node: str, heartbeat: pb.Heartbeat) -> None:
        if heartbeat.HasField("driver_lines"):
            said = heartbeat.driver_lines
            newest = cut(said.newest, job_limits.MAX_DRIVER_LINE_CHARS)
            self.driver_lines[node] = pb.DriverLines(count=said.count, newest=newest)

    def _wanted_check(self, node: str) -> str:
        return self._engine.core.wanted_check(node, self._engine.clock.now())

    def _signal_event(self, node: str, signal: pb.Signal) -> events.NodeSignalled:
        decision = self._policy.decide(signal.kind, signal.code)
        self._on_signal(signal.kind.removesuffix(OVER), signal.code, decision.action)
        where = f" on {signal.device}" if signal.device else ""
        self._caller_log.log(logging.INFO, node, f"{node}: {signal.kind} {signal.code}{where}: {signal.text}")
        lasting = f"{signal.kind.removesuffix(OVER)} {signal.code}{where}"
        error = self._program_error_before(node, signal, decision)
        reason = f"{decision.reason}{where}{f', after the program met {error}' if error else ''}"
        return events.NodeSignalled(node, decision.action, reason, signal.text, decision.response, lasting, error)

    def _program_error_before(self, node: str, signal: pb.Signal, decision: SignalDecision) -> str:
        """The error of a program that came just before the driver gave the node up; empty: none.

        A page fault (Xid 31) can leave NVIDIA's driver in a state that only a boot of the node ends, and the script
        that has caused it does so on the next node, too.
        """
        now = clock.monotonic()
        at, error = self._program_errors.get(node, (float("-inf"), ""))
        is_in_row = now - at < FOLLOW_UP_S
        if decision.by_program:
            self._program_errors[node] = now, error if is_in_row else decision.reason
        is_follow_up = signal.kind == "gpu-recovery" and signal.code in _BOOTS
        return error if is_follow_up and is_in_row else ""

    async def _admit(self, hello: pb.NodeHello) -> None:
        caller, called_at = current_caller(), clock.monotonic()
        addresses = await self._addresses(hello.node, await self._lookup.node(hello.node, caller.uid))
        if not self._rights.allows(current_method(), caller, node_addresses=addresses):
            # The answer may be older than the node's last change: ask again.
            found = await self._lookup.node(hello.node, caller.uid, since=called_at)
            addresses = await self._addresses(hello.node, found)
        if not self._rights.allows(current_method(), caller, node_addresses=addresses):
            known = " ".join(sorted(addresses)) or "no address"
            raise permission_denied(
                f"the daemon of {hello.node} is root at {known} (Slurm's address for it); "
                f"this call is from uid {caller.uid} at {caller.address}"
            )

    def _check_version(self, hello: pb.NodeHello) -> None:
        """Raises CallRefused: the daemon's version does not fit this one."""
        if reason := compatibility.misfit(self._side, compatibility.read(f"musterd on {hello.node}", hello.release)):
            raise failed_precondition(reason)

    async def _addresses(self, node: str, found: Node | Gone | Unknown) -> set[str]:
        """The IP addresses of the node, from Slurm's answer `found`; the known ones while no name server answers.

        Raises:
            CallRefused: they are not known.
        """
        try:
            return {address for name in self._host_names(node, found) for address in await self._resolve(name)}
        except NameUnresolved as error:
            known = self._engine.core.state.nodes.get(node)
            if known is None or not known.addresses:
                raise unavailable(f"the addresses of {node} are unknown: {error}") from None
            return set(known.addresses)

    def _limit_new_registrations(self, hello: pb.NodeHello) -> None:
        """Count the daemon, unless the journal knows what it says.

        Raises:
            CallRefused: the node says something new too often.
        """
        node, says = self._engine.core.state.node(hello.node), _attached(hello, current_caller().address)
        if (node.boot_id, node.probe_address, node.addresses) != (says.boot_id, says.probe_address, says.addresses):
            self._attach_rate.note(hello.node, f"the daemon of {hello.node}", clock.monotonic())

    def _host_names(self, node: str, found: Node | Gone | Unknown) -> set[str]:
        """Host names or addresses of the node, to be resolved."""
        if isinstance(found, Node):
            return {name for name in (found.address, found.hostname) if name} or {node}
        if isinstance(found, Gone):
            raise permission_denied(f"Slurm has no node {node}: --node must be the node's name in slurm.conf")
        known = self._engine.core.state.nodes.get(node)
        if known is None or not known.probe_address:
            raise unavailable(f"can't get node {node} from Slurm: {found.reason}")
        return {known.probe_address.rpartition(":")[0].strip("[]")}


def _attached(hello: pb.NodeHello, caller_address: str) -> events.NodeAttached:
    """The event of a daemon that calls from `caller_address`. That is an address of the node, too."""
    addresses = tuple(sorted({*hello.addresses, caller_address})) if hello.addresses else ()
    return events.NodeAttached(hello.node, hello.boot_id, hello.incarnation, hello.probe_address, addresses)


async def _read_hello(messages: AsyncIterator[pb.NodeMessage]) -> pb.NodeHello:
    first = await anext(messages, None)
    if first is None or not first.HasField("hello") or not first.hello.node:
        raise invalid_argument("the first message must be hello with the node's name")
    try:
        check_hello(first.hello)
    except conversion.InvalidMessage as error:
        raise invalid_argument(str(error)) from None
    return first.hello
