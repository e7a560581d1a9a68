"""Probes of a silent node: the coordinator's own two probes, and the orders to other agents to probe the node.

An agent that was asked to probe and does not answer the coordinator is no evidence: nothing is posted for it. Nor is
the silence that the coordinator found in a time in which it mostly wrote its journal, and read no answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.events import Silence
from muster.daemon.coordinator.core.state.observed_state import AGENT, MUSTERD
from muster.daemon.coordinator.core.turn.turn import ProbeRequest
from muster.daemon.coordinator.shell.agent_streams import AgentStreams
from muster.daemon.host.lasting_problem import LastingProblem
from muster.daemon.host.name_resolution import NameResolver, NameUnresolved
from muster.daemon.transport import call_binding
from muster.daemon.transport.identity import Credentials, IdentityUnavailable
from muster.daemon.transport.reachability import Probed, Reachability, probe
from muster.daemon.transport.tls import Trust
from muster.v1 import agent_pb2

_SILENCES = {
    None: None,
    Reachability.ACCEPTED: Silence.KERNEL_ONLY,
    Reachability.REFUSED: Silence.CLOSED,
    Reachability.NO_ANSWER: Silence.NO_ANSWER,
}
_UNHEARD = (Reachability.ACCEPTED, Reachability.NO_ANSWER)
"""Results that an answer would have changed."""
WRITES_SHARE = 0.5
"""Share of a probe's deadline that this process may spend in writes. A process answers within milliseconds, so the
other half is enough to hear it."""
_log = logging.getLogger(__name__)


class Prober:
    """Carries out probe requests. Every answer is posted as a Probed event."""

    def __init__(
        self,
        credentials: Credentials,
        streams: AgentStreams,
        term: int,
        post: Callable[[events.Event], None],
        trust: Trust | None = None,
        written_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`trust`: whom to take for a node's daemon or an agent; None: plain text. `written_s`: seconds that this
        process has spent in writes until now."""
        self._credentials = credentials
        self._trust = trust
        self._written_s = written_s
        self._streams = streams
        self._term = term
        self._post = post
        self._tasks: set[asyncio.Task[None]] = set()
        self._names = NameResolver()
        self._unable = LastingProblem(_log, "this host can probe nodes again")

    def start(self, request: ProbeRequest) -> None:
        """Ask every witness of `request`. Returns at once."""
        for witness in request.witnesses:
            if witness in (AGENT, MUSTERD):
                task = asyncio.create_task(self._probe_from_here(request, witness))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif stream := self._streams.get(request.gang, witness):
                stream.put(agent_pb2.CoordinatorMessage(term=self._term, probe=_probe_order(request)))

    async def aclose(self) -> None:
        """Cancel the probes under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _probe_from_here(self, request: ProbeRequest, witness: str) -> None:
        written_before_s = self._written_s()
        try:
            found = await probe(
                _probed(request, witness), self._credentials, request.deadline_s, self._trust, self._names
            )
        except (IdentityUnavailable, NameUnresolved) as error:
            self._unable.meet(f"can't probe {witness} on {request.node}: {error}")
            return
        self._unable.end()
        wrote_s = self._written_s() - written_before_s
        if found in _UNHEARD and wrote_s > WRITES_SHARE * request.deadline_s:
            return  # the core repeats the round
        self._post(events.ProbeAnswered(request.gang, request.probe, witness, request.node, _SILENCES[found]))


def _probed(request: ProbeRequest, witness: str) -> Probed:
    """The process that this coordinator asks itself."""
    if witness == AGENT:
        return Probed(request.peer_address, request.node, call_binding.name_of_agent(request.gang, request.node))
    return Probed(request.probe_address, request.node, call_binding.name_of_node_daemon(request.node))


def _probe_order(request: ProbeRequest) -> agent_pb2.ProbeOrder:
    return agent_pb2.ProbeOrder(
        probe_id=request.probe,
        node=request.node,
        peer_address=request.peer_address,
        deadline_ms=round(request.deadline_s * 1000),
    )
