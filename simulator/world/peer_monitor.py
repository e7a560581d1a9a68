"""What one agent hears from its peers, and how it judges silence with the real `silence_rules`.

Pings are not sent one by one. The age of a contact follows from the time at which the two agents could last reach each
other and from the ping interval. The agent checks the clock only while a peer is silent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.agent.failure_detector import silence_rules
from muster.daemon.coordinator.core.state.events import PeerAccused, Silence
from muster.daemon.transport.fencing_timeouts import SELF_FENCE_AFTER_S
from muster.v1.agent_pb2 import DUTY_RUN, Order

if TYPE_CHECKING:
    from muster.simulator.world.agent import Agent

SLOW_PING_INTERVAL_S = 5.0
"""Seconds between two pings to a peer that is not watched."""
ACCUSATION_INTERVAL_S = 2.0
"""Seconds before an agent repeats an accusation."""
LAST_ANSWER_KEPT_S = 10.0
"""Seconds for which an agent reports when it last answered a former member."""
CHECK_INTERVAL_S = 0.1
"""Seconds between two checks of the clock while self-fencing is near."""
SLOW_CHECK_INTERVAL_S = 0.35
"""Seconds between two checks otherwise; fewer checks make the simulator faster."""
_STALL_S = 0.5
"""Seconds. After a longer gap between two checks the agent itself stood still."""
_RECONNECT_S = 0.15
"""Seconds until a broken link is open again, or until the answer to an earlier ping arrives."""


class PeerMonitor:
    """The contacts of one agent with its peers, and the judgement on their silence."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._membership = silence_rules.PeerGroup(agent.node)
        self._last_contact_before_break: dict[str, float] = {}
        """By unreachable peer: the time of the last contact."""
        self._ping_phase: dict[str, float] = {}
        self._closed: set[str] = set()
        self._pinged_until_rejected: set[str] = set()
        self._last_answered_at: dict[str, float] = {}
        self._accused_at: dict[str, float] = {}
        self._run_started_at = self._stalled_until = float("-inf")
        self._generation = 0
        self._is_checking = False
        self._last_check_at = 0.0
        self.suspicion_since: float | None = None

    @property
    def _now(self) -> float:
        return self._agent.schedule.now

    def apply_order(self, order: Order) -> None:
        """Take over members and watched peers from an order."""
        if order.duty == DUTY_RUN and order.generation > self._generation:
            self._run_started_at = self._now
        self._generation = order.generation
        members = frozenset(member.node for member in order.members)
        own_entry = next((member for member in order.members if member.node == self._agent.node), None)
        watched_peers = frozenset(own_entry.neighbours if own_entry is not None else ()) & members
        for node in sorted(self._membership.members - members):
            self._record_last_answer(node)
        self._begin_links(members - self._membership.members)
        self._membership = silence_rules.PeerGroup(self._agent.node, members, watched_peers - {self._agent.node})
        self._accused_at = {node: at for node, at in self._accused_at.items() if node in members}
        self.start_checking()

    def _begin_links(self, nodes: frozenset[str]) -> None:
        """A silence of which this agent knows from before a node came back is over: the new link begins now."""
        for node in nodes:
            self._closed.discard(node)
            if node in self._last_contact_before_break:
                self._last_contact_before_break[node] = self._now

    # -- contacts --

    def reachability_changed(self, node: str, reachable: bool) -> None:
        """From now on the two agents can, or can't, ping each other."""
        if reachable:
            if node in self._last_contact_before_break:
                self._agent.schedule.call_later(_RECONNECT_S, self._link_restored, node)
        else:
            if node not in self._last_contact_before_break:
                self._last_contact_before_break[node] = self._now - self._contact_age_s(node)
            self.start_checking()

    def _link_restored(self, node: str) -> None:
        if self._agent.is_running() and self._agent.world.reachable_peer(self._agent, node) is not None:
            self._last_contact_before_break.pop(node, None)
            self._closed.discard(node)

    def connection_closed(self, node: str) -> None:
        """The peer's kernel has closed the connection: the peer's process has ended."""
        if node in self._membership.members and node not in self._closed:
            self._closed.add(node)
            if node in self._membership.watched_peers:
                self._accused_at.pop(node, None)
                self._accuse(node, Silence.CLOSED)

    def was_closed(self, node: str) -> bool:
        """The peer's kernel closed the connection."""
        return node in self._closed

    def _ping_interval_s(self, node: str) -> float:
        if self.suspicion_since is not None:
            return silence_rules.SUSPICION_PING_S
        return silence_rules.WATCHED_PEER_PING_S if node in self._membership.watched_peers else SLOW_PING_INTERVAL_S

    def _contact_age_s(self, node: str) -> float:
        if node not in self._ping_phase:
            self._ping_phase[node] = self._agent.world.rng.random()
        return self._ping_interval_s(node) * self._ping_phase[node]

    def last_contact(self, node: str) -> float:
        """The time at which the newest answered ping to `node` was sent."""
        at = self._last_contact_before_break.get(node)
        return at if at is not None else self._now - self._contact_age_s(node)

    def heard_s(self) -> dict[str, float]:
        """Seconds since each frequently pinged peer last answered."""
        frequent_peers = (
            self._membership.watched_peers
            if self.suspicion_since is None
            else self._membership.members - {self._agent.node}
        )
        now = self._now
        return {node: now - self.last_contact(node) for node in sorted(frequent_peers)}

    def _record_last_answer(self, node: str) -> None:
        """`node` is no longer a member. From now on the answer to its pings says so."""
        other = self._agent.world.agents.get((self._agent.identity.gang, node))
        if other is not None and other.alive:
            self._last_answered_at[node] = other.peer_monitor.last_contact(self._agent.node)

    def answered_s(self) -> dict[str, float]:
        """Seconds since this agent last answered each former member as a member."""
        ages = {
            node: self._now - at for node, at in self._last_answered_at.items() if node not in self._membership.members
        }
        return {node: age for node, age in ages.items() if age < LAST_ANSWER_KEPT_S}

    # -- judgement --

    def start_checking(self) -> None:
        """Check the clock soon, and again for as long as a peer is silent."""
        if not self._is_checking:
            self._is_checking = True
            self._last_check_at = self._now
            self._agent.call_later(CHECK_INTERVAL_S, self._check)

    def _check(self) -> None:
        self._is_checking = False
        agent, now = self._agent, self._now
        if now - self._last_check_at > _STALL_S:
            self._stalled_until = now
        if (
            not any(node in self._last_contact_before_break for node in self._membership.members)
            and self.suspicion_since is None
        ):
            return
        judged = silence_rules.evaluate(now, self._membership, self._last_contacts())
        suspicion_began = self.suspicion_since is None and judged.suspicion_since is not None
        self.suspicion_since = judged.suspicion_since
        if suspicion_began:
            agent.ping_now()
        for node in sorted(judged.accuse):
            self._accuse(node, Silence.CLOSED if node in self._closed else Silence.NO_ANSWER)
        if judged.self_fence_reason and now - self._run_started_at >= SELF_FENCE_AFTER_S:
            agent.self_fence(judged.self_fence_reason)
        # Only self-fencing needs a resolution of a tenth of a second.
        precise = self.suspicion_since is None or now - agent.coordinator_contact > 1.0
        self._is_checking = True
        self._last_check_at = now
        agent.call_later(CHECK_INTERVAL_S if precise else SLOW_CHECK_INTERVAL_S, self._check)

    def _last_contacts(self) -> silence_rules.LastContacts:
        others = self._membership.members - {self._agent.node}
        # Sorted, because each call may draw a random number.
        contacts = {node: self.last_contact(node) for node in sorted(others)}
        return silence_rules.LastContacts(
            contacts, self._agent.coordinator_contact, self.suspicion_since, self._stalled_until
        )

    def _accuse(self, node: str, silence: Silence) -> None:
        if self._now - self._accused_at.get(node, float("-inf")) < ACCUSATION_INTERVAL_S:
            return
        self._accused_at[node] = self._now
        agent = self._agent
        agent.send("accusation", PeerAccused(agent.identity.gang, agent.node, node, silence))

    def accuse_again(self) -> None:
        """Repeat every accusation that still holds."""
        self._accused_at.clear()
        for node in sorted(self._membership.watched_peers & self._closed):
            self._accuse(node, Silence.CLOSED)
        if self._last_contact_before_break:
            self.start_checking()

    # -- removed nodes --

    def ping_until_rejected(self, other: Agent) -> None:
        """Ping `other`, whose order does not list this node as a member, until an answer can say so."""
        agent, order = self._agent, other.order
        if not any(rank.is_active for rank in agent.ranks.values()) or order is None or not other.alive:
            self._pinged_until_rejected.discard(other.node)
            return
        if any(member.node == agent.node for member in order.members):
            self._pinged_until_rejected.discard(other.node)
            return
        if order.generation >= self._generation and agent.world.reachable_peer(agent, other.node) is other:
            self._pinged_until_rejected.discard(other.node)
            agent.self_fence(f"{other.node} says that generation {order.generation} goes on without this node")
            return
        agent.call_later(self._ping_interval_s(other.node), self.ping_until_rejected, other)

    def expect_rejection(self, other: Agent) -> None:
        """The answer to the next ping to `other` will say that this node is no longer a member."""
        if other.node not in self._pinged_until_rejected and other.node in self._membership.members:
            self._pinged_until_rejected.add(other.node)
            self._agent.call_later(self._contact_age_s(other.node), self.ping_until_rejected, other)
