"""Asks after a silent node: the coordinator's own two probes, and orders to other agents to probe for it.

An agent that was asked and doesn't answer the coordinator says nothing about anybody: it posts nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.events import Silence
from muster.daemon.coordinator.core.state.observed_state import AGENT, MUSTERD
from muster.daemon.coordinator.core.state.turn import ProbeRequest
from muster.daemon.coordinator.shell.agent_streams import AgentStreams
from muster.daemon.transport.identity import Credentials, IdentityUnavailable
from muster.daemon.transport.reachability import Reachability, probe
from muster.v1 import agent_pb2

_SILENCES = {
    None: None,
    Reachability.OPEN: Silence.KERNEL_ONLY,
    Reachability.CLOSED: Silence.CLOSED,
    Reachability.MUTE: Silence.NO_ANSWER,
}
_log = logging.getLogger(__name__)


class Prober:
    """Carries out Asks; every answer becomes a Probed."""

    def __init__(
        self, credentials: Credentials, streams: AgentStreams, term: int, post: Callable[[events.Event], None]
    ) -> None:
        self._credentials = credentials
        self._streams = streams
        self._term = term
        self._post = post
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, ask: ProbeRequest) -> None:
        """Ask every witness; returns at once."""
        for witness in ask.witnesses:
            if witness in (AGENT, MUSTERD):
                task = asyncio.create_task(self._own(ask, witness))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif stream := self._streams.get(ask.gang, witness):
                stream.put(agent_pb2.CoordinatorMessage(term=self._term, probe=_order(ask)))

    async def aclose(self) -> None:
        """Drop the probes under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _own(self, ask: ProbeRequest, witness: str) -> None:
        address = ask.peer_address if witness == AGENT else ask.probe_address
        try:
            met = await probe(address, ask.node, self._credentials, ask.deadline_s)
        except IdentityUnavailable as error:
            _log.error("can't probe %s on %s: %s", witness, ask.node, error)
            return
        self._post(events.Probed(ask.gang, ask.probe, witness, ask.node, _SILENCES[met]))


def _order(ask: ProbeRequest) -> agent_pb2.ProbeOrder:
    return agent_pb2.ProbeOrder(
        probe_id=ask.probe,
        node=ask.node,
        peer_address=ask.peer_address,
        deadline_ms=round(ask.deadline_s * 1000),
    )
