"""What an agent concludes from silence: whom to accuse, whom else to ping, when to kill its own ranks.

Pure: all times are seconds on one monotonic clock and are passed in. A *contact* is the time at which the newest
answered ping was sent: nothing newer is known about a peer.

    a watched peer is silent 0.75 s  a *suspicion* begins: ping the coordinator and all members every 250 ms
    a watched peer is silent 1.25 s  accuse that peer
    2 s without an answer from       kill the ranks (self-fencing). This node counts as heard. At exactly half
    the coordinator and from a       of the gang, the coordinator's answer decides.
    majority of the gang

The coordinator relies on self-fencing: it starts no new generation before every silent agent must have killed its
ranks. So an agent that was paused must kill too: its contacts are old. Nothing relies on accusations, so an agent that
was paused accuses nobody because of the pause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from muster.daemon.transport.fencing_timeouts import ACCUSE_AFTER_S, SELF_FENCE_AFTER_S

WATCHED_PEER_PING_S = 0.5
"""Seconds between two pings to a watched peer."""
SUSPICION_PING_S = 0.25
"""Seconds between two pings during a suspicion."""
SUSPECT_AFTER_S = 0.75
"""Seconds of a watched peer's silence after which a suspicion begins."""

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class PeerGroup:
    """The gang as one agent sees it.

    own_node: the agent's node.
    members: all nodes of the gang, `own_node` too.
    watched_peers: the nodes that the agent always pings.
    """

    own_node: str
    members: frozenset[str] = frozenset()
    watched_peers: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LastContacts:
    """When this agent last heard from whom.

    contacts: the last contact with each node. A watched peer that has never answered has the time of the first ping.
    coordinator: the last contact with the coordinator; minus infinity: never.
    suspicion_since: the last contact with the peer whose silence began the suspicion; None: nobody is suspected.
        A node that is pinged only during a suspicion counts as heard until this time.
    awake_since: since when this agent has run without a pause.
    """

    contacts: Mapping[str, float] = field(default_factory=dict)
    coordinator: float = _NEVER
    suspicion_since: float | None = None
    awake_since: float = _NEVER


@dataclass(frozen=True, slots=True)
class Decision:
    """What the agent has to do.

    suspicion_since: as in `LastContacts`, from now on.
    accuse: seconds of silence of each node to accuse.
    self_fence_reason: why the ranks must be killed; empty: the ranks live on.
    """

    suspicion_since: float | None = None
    accuse: Mapping[str, float] = field(default_factory=dict)
    self_fence_reason: str = ""


def evaluate(now: float, group: PeerGroup, last_contacts: LastContacts) -> Decision:
    """Decide what follows from the contacts at the time `now`."""
    contacts = {node: last_contacts.contacts.get(node, now) for node in group.watched_peers - {group.own_node}}
    silent = [contact for contact in contacts.values() if now - contact >= SUSPECT_AFTER_S]
    if not silent:
        return Decision()
    suspicion_since = min(silent) if last_contacts.suspicion_since is None else last_contacts.suspicion_since
    accuse = {
        node: now - at for node, at in contacts.items() if now - max(at, last_contacts.awake_since) >= ACCUSE_AFTER_S
    }
    return Decision(suspicion_since, accuse, _self_fence_reason(now, group, last_contacts, suspicion_since))


def _self_fence_reason(now: float, group: PeerGroup, last_contacts: LastContacts, suspicion_since: float) -> str:
    if now - max(last_contacts.coordinator, suspicion_since) < SELF_FENCE_AFTER_S:
        return ""
    others = group.members - {group.own_node}
    heard_count = 1 + sum(
        now - _contact_with(last_contacts, group, node, suspicion_since) < SELF_FENCE_AFTER_S for node in others
    )
    if 2 * heard_count > len(group.members):
        return ""
    return (
        f"neither the coordinator nor a majority of the gang has answered for {SELF_FENCE_AFTER_S:g} s "
        f"({heard_count} of {len(group.members)} heard, this node among them)"
    )


def _contact_with(last_contacts: LastContacts, group: PeerGroup, node: str, suspicion_since: float) -> float:
    if node in group.watched_peers and node in last_contacts.contacts:
        return last_contacts.contacts[node]
    return max(last_contacts.contacts.get(node, _NEVER), suspicion_since)
