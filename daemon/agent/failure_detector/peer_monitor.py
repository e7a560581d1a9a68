"""Monitors the other agents of the gang: links to the watched peers, links to all members during a suspicion, and what
follows.

`silence_rules` decides. This module holds the links, the clock and the callbacks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from muster.daemon.agent.failure_detector import silence_rules
from muster.daemon.agent.failure_detector.peer_link import LinkCallbacks, LinkEndpoints, PeerLink
from muster.daemon.agent.failure_detector.peers import AgentIdentity, OpenLink
from muster.daemon.agent.failure_detector.version_check import VersionCheck
from muster.daemon.host import clock
from muster.daemon.transport.fencing_timeouts import SELF_FENCE_AFTER_S
from muster.v1.agent_pb2 import DUTY_RUN, Accusation, Order, Silence
from muster.v1.peer_pb2 import LinkPong

log = logging.getLogger(__name__)

TICK_S = 0.1
# In a gang with fewer members, every agent keeps a link to every other agent. During a suspicion an answer then takes
# one round trip, without a new connection and credential. Members that are not watched peers are pinged rarely until
# then.
_FULL_MESH_MEMBERS = 32
_IDLE_PING_S = 5.0
_STALL_S = 0.5
_REPEAT_ACCUSATION_S = 2.0


@dataclass(frozen=True, slots=True)
class MonitorCallbacks:
    """What the monitor calls.

    coordinator: returns the time of the last contact with the coordinator.
    suspicion_changed: a suspicion has begun (True) or ended (False).
    accuse: sends an accusation to the coordinator.
    self_fence: kills this node's ranks, for the reason given.
    versions: compares the versions of agents; None: nobody does.
    """

    coordinator: Callable[[], float]
    suspicion_changed: Callable[[bool], None]
    accuse: Callable[[Accusation], None]
    self_fence: Callable[[str], None]
    versions: VersionCheck | None = None


@dataclass
class _MonitorState:
    suspicion_since: float | None = None
    awake_since: float = field(default_factory=clock.monotonic)
    ticked_at: float = field(default_factory=clock.monotonic)
    ranks_started_at: float = float("-inf")
    accused_at: dict[str, float] = field(default_factory=dict)


class PeerMonitor:
    """Keeps the links of one agent. Call `apply_order` with each order. `run` lasts as long as the agent."""

    def __init__(self, identity: AgentIdentity, open_link: OpenLink, callbacks: MonitorCallbacks) -> None:
        self._identity = identity
        self._open_link = open_link
        self._callbacks = callbacks
        self._links: dict[str, PeerLink] = {}
        self._addresses: dict[str, str] = {}
        self._group = silence_rules.PeerGroup(identity.node)
        self._generation = 0
        self._state = _MonitorState()

    def apply_order(self, order: Order) -> None:
        """Take members and watched peers from the order."""
        if order.duty == DUTY_RUN and order.generation > self._generation:
            self._state.ranks_started_at = clock.monotonic()
        self._generation = order.generation
        self._addresses = {member.node: member.peer_address for member in order.members}
        me = next((member for member in order.members if member.node == self._identity.node), None)
        watched_peers = frozenset(me.neighbours if me is not None else ()) & frozenset(self._addresses)
        self._group = silence_rules.PeerGroup(
            self._identity.node, frozenset(self._addresses), watched_peers - {self._identity.node}
        )
        self._state.accused_at = {n: at for n, at in self._state.accused_at.items() if n in self._addresses}
        self._set_links(wide=self._state.suspicion_since is not None)

    def heard_ms(self) -> dict[str, int]:
        """Milliseconds since the last contact with each node that is pinged often."""
        now = clock.monotonic()
        often = {node: link for node, link in self._links.items() if link.period < _IDLE_PING_S}
        return {node: max(0, round(1000 * (now - link.last_contact))) for node, link in often.items()}

    def closed_by_peer(self, node: str) -> bool:
        """Return whether the kernel of `node` has closed our connection and has accepted none since."""
        return node in self._links and self._links[node].closed_by_peer

    def repeat_accusations(self) -> None:
        """Report all accusations again: a new coordinator may not know them."""
        self._state.accused_at.clear()
        for node in self._group.watched_peers:
            if self.closed_by_peer(node):
                self._on_closed(node)

    async def run(self) -> None:
        """Evaluate the contacts every TICK_S seconds."""
        while True:
            await asyncio.sleep(TICK_S)
            self._tick(clock.monotonic())

    def stop(self) -> None:
        """Close all links."""
        for link in self._links.values():
            link.stop()
        self._links.clear()

    def _tick(self, now: float) -> None:
        state = self._state
        if now - state.ticked_at > _STALL_S:
            log.warning("this agent was paused for %.1f s", now - state.ticked_at)
            state.awake_since = now
        state.ticked_at = now
        decision = silence_rules.evaluate(now, self._group, self._last_contacts())
        if (decision.suspicion_since is None) != (state.suspicion_since is None):
            self._set_links(wide=decision.suspicion_since is not None)
            self._callbacks.suspicion_changed(decision.suspicion_since is not None)
        state.suspicion_since = decision.suspicion_since
        for node, seconds in decision.accuse.items():
            silence = Silence.SILENCE_CLOSED if self.closed_by_peer(node) else Silence.SILENCE_NO_ANSWER
            self._accuse(node, silence, seconds)
        # Silence from before the ranks' start does not count: pings are late while the ranks import PyTorch.
        if decision.self_fence_reason and now - state.ranks_started_at >= SELF_FENCE_AFTER_S:
            self._callbacks.self_fence(decision.self_fence_reason)

    def _last_contacts(self) -> silence_rules.LastContacts:
        # A member that is pinged only during a suspicion counts from the beginning of the suspicion.
        contacts = {
            node: link.last_contact
            for node, link in self._links.items()
            if link.answered or node in self._group.watched_peers
        }
        return silence_rules.LastContacts(
            contacts, self._callbacks.coordinator(), self._state.suspicion_since, self._state.awake_since
        )

    def _accuse(self, node: str, silence: Silence.ValueType, seconds: float) -> None:
        now = clock.monotonic()
        if now - self._state.accused_at.get(node, float("-inf")) < _REPEAT_ACCUSATION_S:
            return
        self._state.accused_at[node] = now
        log.warning("%s is silent for %.2f s (%s)", node, seconds, Silence.Name(silence))
        self._callbacks.accuse(
            Accusation(node=node, silence=silence, generation=self._generation, silent_ms=max(0, round(1000 * seconds)))
        )

    def _set_links(self, *, wide: bool) -> None:
        others = self._group.members - {self._identity.node}
        wanted = others if wide or len(others) < _FULL_MESH_MEMBERS else self._group.watched_peers
        for node, link in list(self._links.items()):
            if node not in wanted or link.endpoints.peer_address != self._addresses[node]:
                self._links.pop(node).stop()
        link_callbacks = LinkCallbacks(
            lambda: self._generation, self._on_pong, self._on_closed, self._callbacks.versions
        )
        for node in wanted - set(self._links):
            ends = LinkEndpoints(self._identity.gang, self._identity.node, node, self._addresses[node])
            self._links[node] = PeerLink(ends, self._open_link, link_callbacks)
        for node, link in self._links.items():
            calm = silence_rules.WATCHED_PEER_PING_S if node in self._group.watched_peers else _IDLE_PING_S
            link.set_period(silence_rules.SUSPICION_PING_S if wide else calm)

    def _on_pong(self, node: str, pong: LinkPong) -> None:
        self._state.accused_at.pop(node, None)
        if pong.outcast and pong.generation >= self._generation:
            self._callbacks.self_fence(f"{node} says that generation {pong.generation} goes on without this node")

    def _on_closed(self, node: str) -> None:
        if node in self._group.watched_peers and node in self._links:
            self._state.accused_at.pop(node, None)
            self._accuse(node, Silence.SILENCE_CLOSED, clock.monotonic() - self._links[node].last_contact)
