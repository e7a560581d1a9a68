"""What one agent hears of the others, and what it makes of silence (by the real `silence_rules.evaluate`).

Pings are not sent one by one: the age of a contact follows from when the two could last reach each other, and from how
often the one pings the other. The clock is looked at only while somebody is silent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.agent.failure_detector import silence_rules
from muster.daemon.coordinator.core.state.events import NeighbourAccused, Silence
from muster.daemon.transport.fencing_timeouts import SELF_FENCE_AFTER_S
from muster.v1.agent_pb2 import DUTY_RUN, Order

if TYPE_CHECKING:
    from muster.simulator.world.agent import Agent

SELDOM_S = 5.0
ACCUSE_AGAIN_S = 2.0
ANSWERED_S = 10.0
TICK_S = 0.1
LAZY_TICK_S = 0.35
_STALLED_S = 0.5
_DIAL_S = 0.15
"""Until a broken link is open again, or an answer to an old ping has come."""


class Uneasy:
    """Contacts of one agent, and the judgement on them."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._circle = silence_rules.PeerGroup(agent.node)
        self._broken: dict[str, float] = {}
        """Contact with whom it can't reach now."""
        self._phase: dict[str, float] = {}
        self._closed: set[str] = set()
        self._asking: set[str] = set()
        self._answered: dict[str, float] = {}
        self._accused: dict[str, float] = {}
        self._started = self._awake = float("-inf")
        self._generation = 0
        self._ticking = False
        self._slept_at = 0.0
        self.spell: float | None = None

    @property
    def _now(self) -> float:
        return self._agent.schedule.now

    def enlist(self, order: Order) -> None:
        """Take over members and neighbours."""
        if order.duty == DUTY_RUN and order.generation > self._generation:
            self._started = self._now
        self._generation = order.generation
        members = frozenset(member.node for member in order.members)
        me = next((member for member in order.members if member.node == self._agent.node), None)
        near = frozenset(me.neighbours if me is not None else ()) & members
        for node in sorted(self._circle.members - members):
            self._take_leave(node)
        self._circle = silence_rules.PeerGroup(self._agent.node, members, near - {self._agent.node})
        self._accused = {node: at for node, at in self._accused.items() if node in members}
        self.look()

    # -- contacts --

    def reach(self, node: str, reaches: bool) -> None:
        """The two can, or can't, ping each other from now on."""
        if reaches:
            if node in self._broken:
                self._agent.schedule.later(_DIAL_S, self._mended, node)
        else:
            if node not in self._broken:
                self._broken[node] = self._now - self._age(node)
            self.look()

    def _mended(self, node: str) -> None:
        if self._agent.awake() and self._agent.world.peer(self._agent, node) is not None:
            self._broken.pop(node, None)
            self._closed.discard(node)

    def lose(self, node: str) -> None:
        """The other's kernel has closed the link: its process has ended."""
        if node in self._circle.members and node not in self._closed:
            self._closed.add(node)
            if node in self._circle.neighbours:
                self._accused.pop(node, None)
                self._accuse(node, Silence.CLOSED)

    def closed(self, node: str) -> bool:
        """The link was closed by the other's kernel."""
        return node in self._closed

    def _period(self, node: str) -> float:
        if self.spell is not None:
            return silence_rules.SUSPICION_PING_S
        return silence_rules.NEIGHBOUR_PING_S if node in self._circle.neighbours else SELDOM_S

    def _age(self, node: str) -> float:
        if node not in self._phase:
            self._phase[node] = self._agent.world.chance.random()
        return self._period(node) * self._phase[node]

    def contact(self, node: str) -> float:
        """When the newest ping that `node` answered was sent."""
        at = self._broken.get(node)
        return at if at is not None else self._now - self._age(node)

    def heard_s(self) -> dict[str, float]:
        """Seconds since each node that is pinged often last answered."""
        often = self._circle.neighbours if self.spell is None else self._circle.members - {self._agent.node}
        now = self._now
        return {node: now - self.contact(node) for node in sorted(often)}

    def _take_leave(self, node: str) -> None:
        """`node` is no member any more: from now on its pings are answered with that word."""
        other = self._agent.world.agents.get((self._agent.post.gang, node))
        if other is not None and other.alive:
            self._answered[node] = other.uneasy.contact(self._agent.node)

    def answered_s(self) -> dict[str, float]:
        """Seconds since each node that is no member any more was last answered as one."""
        ages = {node: self._now - at for node, at in self._answered.items() if node not in self._circle.members}
        return {node: age for node, age in ages.items() if age < ANSWERED_S}

    # -- judgement --

    def look(self) -> None:
        """Look at the clock soon, and for as long as somebody is silent."""
        if not self._ticking:
            self._ticking = True
            self._slept_at = self._now
            self._agent.later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        agent, now = self._agent, self._now
        if now - self._slept_at > _STALLED_S:
            self._awake = now
        if not any(node in self._broken for node in self._circle.members) and self.spell is None:
            return
        judged = silence_rules.evaluate(now, self._circle, self._heard())
        began = self.spell is None and judged.suspicion_since is not None
        self.spell = judged.suspicion_since
        if began:
            agent.hurry()
        for node in sorted(judged.accuse):
            self._accuse(node, Silence.CLOSED if node in self._closed else Silence.NO_ANSWER)
        if judged.self_fence_reason and now - self._started >= SELF_FENCE_AFTER_S:
            agent.end_ranks(judged.self_fence_reason)
        # Nothing but the end of the ranks is decided to the tenth of a second.
        near_end = self.spell is None or now - agent.contact > 1.0
        self._ticking = True
        self._slept_at = now
        agent.later(TICK_S if near_end else LAZY_TICK_S, self._tick)

    def _heard(self) -> silence_rules.LastContacts:
        others = self._circle.members - {self._agent.node}
        contacts = {node: self.contact(node) for node in sorted(others)}  # each may draw from chance
        return silence_rules.LastContacts(contacts, self._agent.contact, self.spell, self._awake)

    def _accuse(self, node: str, how: Silence) -> None:
        if self._now - self._accused.get(node, float("-inf")) < ACCUSE_AGAIN_S:
            return
        self._accused[node] = self._now
        agent = self._agent
        agent.say("accusation", NeighbourAccused(agent.post.gang, agent.node, node, how))

    def accuse_again(self) -> None:
        """Say anew whom this agent doesn't hear."""
        self._accused.clear()
        for node in sorted(self._circle.neighbours & self._closed):
            self._accuse(node, Silence.CLOSED)
        if self._broken:
            self.look()

    # -- outcasts --

    def ask(self, other: Agent) -> None:
        """Ping `other`, whose order does not count this node among the gang, until it could say so."""
        agent, order = self._agent, other.order
        if not any(rank.able for rank in agent.ranks.values()) or order is None or not other.alive:
            self._asking.discard(other.node)
            return
        if any(member.node == agent.node for member in order.members):
            self._asking.discard(other.node)
            return
        if order.generation >= self._generation and agent.world.peer(agent, other.node) is other:
            self._asking.discard(other.node)
            agent.end_ranks(f"{other.node} says that generation {order.generation} goes on without this node")
            return
        agent.later(self._period(other.node), self.ask, other)

    def hear_of(self, other: Agent) -> None:
        """The next ping to `other` will be answered with the word that this node is out."""
        if other.node not in self._asking and other.node in self._circle.members:
            self._asking.add(other.node)
            self._agent.later(self._age(other.node), self.ask, other)
