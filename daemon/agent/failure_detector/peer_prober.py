"""Probes another agent because the coordinator asks for it: does it answer, and if not, how is it silent?"""

from __future__ import annotations

import logging
from collections.abc import Callable

from muster.daemon.agent.failure_detector.peers import PeerChannels
from muster.daemon.host.name_resolution import NameResolver, NameUnresolved
from muster.daemon.transport import call_binding
from muster.daemon.transport.identity import Credentials, IdentityUnavailable
from muster.daemon.transport.reachability import Probed, Reachability, probe
from muster.v1.agent_pb2 import ProbeOrder, ProbeResult, Silence

log = logging.getLogger(__name__)

_SILENCE_BY_REACHABILITY = {
    None: Silence.SILENCE_UNSPECIFIED,
    Reachability.ACCEPTED: Silence.SILENCE_KERNEL_ONLY,
    Reachability.REFUSED: Silence.SILENCE_CLOSED,
    Reachability.NO_ANSWER: Silence.SILENCE_NO_ANSWER,
}


class PeerProber:
    """Probes agents of `gang`.

    Args:
        closed_by_peer: whether the kernel of a node has closed this agent's connection and has accepted none since.
        progress: the newest step of each rank of this node. A result says how far they have come.
    """

    def __init__(
        self,
        gang: str,
        credentials: Credentials,
        channels: PeerChannels,
        closed_by_peer: Callable[[str], bool],
        progress: Callable[[], dict[int, int]],
    ) -> None:
        self._gang = gang
        self._credentials = credentials
        self._channels = channels
        self._closed_by_peer = closed_by_peer
        self._progress = progress
        self._names = NameResolver()

    async def probe(self, order: ProbeOrder) -> ProbeResult | None:
        """The result; None: this agent can't probe now."""
        probed = Probed(order.peer_address, order.node, call_binding.name_of_agent(self._gang, order.node))
        deadline_s = order.deadline_ms / 1000
        try:
            silence = await probe(probed, self._credentials, deadline_s, self._channels.trust, self._names)
        except (IdentityUnavailable, NameUnresolved) as error:
            log.error("can't probe %s: %s", order.node, error)
            return None
        if silence is Reachability.NO_ANSWER and self._closed_by_peer(order.node):
            silence = Reachability.REFUSED  # the peer's kernel closed our connection before it stopped answering
        return ProbeResult(
            probe_id=order.probe_id,
            node=order.node,
            answered=silence is None,
            silence=_SILENCE_BY_REACHABILITY[silence],
            step=max(self._progress().values(), default=0),
        )
