"""Keeping in touch with the gang: links to the neighbours, to everybody in a spell of silence, and what follows.

The arithmetic is `silence`; here are the links, the clock and the consequences.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from muster.daemon.agent.failure_detector import silence_rules
from muster.daemon.agent.failure_detector.peer_link import LinkCallbacks, LinkEndpoints, PeerLink
from muster.daemon.agent.failure_detector.peers import AgentIdentity, OpenLink
from muster.daemon.host import clock
from muster.daemon.transport.fencing_timeouts import SELF_FENCE_AFTER_S
from muster.v1.agent_pb2 import DUTY_RUN, Accusation, Order, Silence
from muster.v1.peer_pb2 import LinkPong

log = logging.getLogger(__name__)

TICK_S = 0.1
# In a gang of this size every agent keeps a link to every other: in a spell of silence an answer is then one round trip
# away, not a connection and its credential. Those that are no neighbours are pinged seldom until then.
_SMALL = 32
_SELDOM_S = 5.0
_STALLED_S = 0.5
_ACCUSE_AGAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class MonitorCallbacks:
    """What the monitor calls.

    coordinator: returns the time of the last contact with the coordinator.
    suspicion_changed: a suspicion has begun (True) or ended (False).
    accuse: sends an accusation to the coordinator.
    self_fence: kills this node's ranks, for the reason given.
    """

    coordinator: Callable[[], float]
    suspicion_changed: Callable[[bool], None]
    accuse: Callable[[Accusation], None]
    self_fence: Callable[[str], None]


@dataclass
class _Memory:
    spell: float | None = None
    awake: float = field(default_factory=clock.monotonic)
    ticked: float = field(default_factory=clock.monotonic)
    started: float = float("-inf")
    accused: dict[str, float] = field(default_factory=dict)


class PeerMonitor:
    """Keeps the links of one agent. Call `apply_order` with each order. `run` lasts as long as the agent."""

    def __init__(self, own: AgentIdentity, open_link: OpenLink, consequences: MonitorCallbacks) -> None:
        self._own = own
        self._open_link = open_link
        self._do = consequences
        self._links: dict[str, PeerLink] = {}
        self._addresses: dict[str, str] = {}
        self._circle = silence_rules.PeerGroup(own.node)
        self._generation = 0
        self._memory = _Memory()

    def apply_order(self, order: Order) -> None:
        """Take over members and neighbours."""
        if order.duty == DUTY_RUN and order.generation > self._generation:
            self._memory.started = clock.monotonic()
        self._generation = order.generation
        self._addresses = {member.node: member.peer_address for member in order.members}
        me = next((member for member in order.members if member.node == self._own.node), None)
        near = frozenset(me.neighbours if me is not None else ()) & frozenset(self._addresses)
        self._circle = silence_rules.PeerGroup(self._own.node, frozenset(self._addresses), near - {self._own.node})
        self._memory.accused = {n: at for n, at in self._memory.accused.items() if n in self._addresses}
        self._set_links(wide=self._memory.spell is not None)

    def heard_ms(self) -> dict[str, int]:
        """Milliseconds since each node that is pinged often last answered."""
        now = clock.monotonic()
        often = {node: link for node, link in self._links.items() if link.period < _SELDOM_S}
        return {node: max(0, round(1000 * (now - link.last_contact))) for node, link in often.items()}

    def closed_by_peer(self, node: str) -> bool:
        """Whether `node`'s kernel has closed our connection, and no new one was accepted since."""
        return node in self._links and self._links[node].closed_by_peer

    def repeat_accusations(self) -> None:
        """Say anew whom this agent doesn't hear: the coordinator may have forgotten."""
        self._memory.accused.clear()
        for node in self._circle.neighbours:
            if self.closed_by_peer(node):
                self._closed(node)

    async def run(self) -> None:
        """Look at the clock and draw the consequences, for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            self._tick(clock.monotonic())

    def stop(self) -> None:
        """End all links."""
        for link in self._links.values():
            link.stop()
        self._links.clear()

    def _tick(self, now: float) -> None:
        memory = self._memory
        if now - memory.ticked > _STALLED_S:
            log.warning("this agent stood still for %.1f s", now - memory.ticked)
            memory.awake = now
        memory.ticked = now
        judged = silence_rules.evaluate(now, self._circle, self._heard())
        if (judged.suspicion_since is None) != (memory.spell is None):
            self._set_links(wide=judged.suspicion_since is not None)
            self._do.suspicion_changed(judged.suspicion_since is not None)
        memory.spell = judged.suspicion_since
        for node, seconds in judged.accuse.items():
            how = Silence.SILENCE_CLOSED if self.closed_by_peer(node) else Silence.SILENCE_NO_ANSWER
            self._accuse(node, how, seconds)
        # Silence that is older than the ranks is none of theirs: while ten nodes import PyTorch, pings come late.
        if judged.self_fence_reason and now - memory.started >= SELF_FENCE_AFTER_S:
            self._do.self_fence(judged.self_fence_reason)

    def _heard(self) -> silence_rules.LastContacts:
        # A member that is pinged in spells only counts as pinged from the spell's beginning.
        contacts = {
            node: link.last_contact
            for node, link in self._links.items()
            if link.answered or node in self._circle.neighbours
        }
        return silence_rules.LastContacts(contacts, self._do.coordinator(), self._memory.spell, self._memory.awake)

    def _accuse(self, node: str, how: Silence.ValueType, seconds: float) -> None:
        now = clock.monotonic()
        if now - self._memory.accused.get(node, float("-inf")) < _ACCUSE_AGAIN_S:
            return
        self._memory.accused[node] = now
        log.warning("%s is silent for %.2f s (%s)", node, seconds, Silence.Name(how))
        self._do.accuse(
            Accusation(node=node, silence=how, generation=self._generation, silent_ms=max(0, round(1000 * seconds)))
        )

    def _set_links(self, *, wide: bool) -> None:
        others = self._circle.members - {self._own.node}
        wanted = others if wide or len(others) < _SMALL else self._circle.neighbours
        for node, link in list(self._links.items()):
            if node not in wanted or link.endpoints.peer_address != self._addresses[node]:
                self._links.pop(node).stop()
        hooks = LinkCallbacks(lambda: self._generation, self._pong, self._closed)
        for node in wanted - set(self._links):
            ends = LinkEndpoints(self._own.gang, self._own.node, node, self._addresses[node])
            self._links[node] = PeerLink(ends, self._open_link, hooks)
        for node, link in self._links.items():
            calm = silence_rules.NEIGHBOUR_PING_S if node in self._circle.neighbours else _SELDOM_S
            link.set_period(silence_rules.SUSPICION_PING_S if wide else calm)

    def _pong(self, node: str, pong: LinkPong) -> None:
        self._memory.accused.pop(node, None)
        if pong.outcast and pong.generation >= self._generation:
            self._do.self_fence(f"{node} says that generation {pong.generation} goes on without this node")

    def _closed(self, node: str) -> None:
        if node in self._circle.neighbours and node in self._links:
            self._memory.accused.pop(node, None)
            self._accuse(node, Silence.SILENCE_CLOSED, clock.monotonic() - self._links[node].last_contact)
