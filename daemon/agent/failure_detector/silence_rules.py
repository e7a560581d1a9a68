"""What an agent makes of silence: whom to accuse, whom else to ask, when to end its own ranks.

Pure: times are seconds on one monotonic clock and come in from outside. A *contact* is the time at which the newest
answered ping was sent: what is known about a peer is never younger than that.

    a neighbour silent for 0.75 s   the coordinator and all members are pinged too, every 250 ms (a *spell* begins)
    a neighbour silent for 1.25 s   it is accused
    2 s without an answer from      the ranks are killed; this node counts as heard, and at exactly half of the gang
    the coordinator and from a      the coordinator's answer decides
    majority of the gang

The last line is half of a bargain: the coordinator starts no new generation sooner after a silence than every agent has
killed its ranks. So it is kept to the letter, also by an agent that was stopped for a while: its contacts are old then,
and it kills. Accusations are no bargain: an agent that was stopped blames nobody for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from muster.daemon.transport.fencing_timeouts import ACCUSE_AFTER_S, SELF_FENCE_AFTER_S

NEIGHBOUR_PING_S = 0.5
SUSPICION_PING_S = 0.25
SUSPECT_AFTER_S = 0.75

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class PeerGroup:
    """The gang as one agent sees it.

    own_node: the agent's node.
    members: all nodes of the gang, `own_node` too.
    neighbours: the nodes that the agent always pings.
    """

    own_node: str
    members: frozenset[str] = frozenset()
    neighbours: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LastContacts:
    """When this agent last heard from whom.

    contacts: the last contact with each node. A neighbour that has never answered has the time of the first ping.
    coordinator: the last contact with the coordinator; minus infinity: never.
    suspicion_since: the last contact with the neighbour whose silence began the suspicion; None: nobody is suspected.
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


def evaluate(now: float, circle: PeerGroup, heard: LastContacts) -> Decision:
    """What follows from what has been heard until `now`."""
    contacts = {node: heard.contacts.get(node, now) for node in circle.neighbours - {circle.own_node}}
    silent = [contact for contact in contacts.values() if now - contact >= SUSPECT_AFTER_S]
    if not silent:
        return Decision()
    spell = min(silent) if heard.suspicion_since is None else heard.suspicion_since
    accuse = {node: now - at for node, at in contacts.items() if now - max(at, heard.awake_since) >= ACCUSE_AFTER_S}
    return Decision(spell, accuse, _why_kill(now, circle, heard, spell))


def _why_kill(now: float, circle: PeerGroup, heard: LastContacts, spell: float) -> str:
    if now - max(heard.coordinator, spell) < SELF_FENCE_AFTER_S:
        return ""
    others = circle.members - {circle.own_node}
    near = 1 + sum(now - _presumed(heard, circle, node, spell) < SELF_FENCE_AFTER_S for node in others)
    if 2 * near > len(circle.members):
        return ""
    return (
        f"neither the coordinator nor a majority of the gang has answered for {SELF_FENCE_AFTER_S:g} s "
        f"({near} of {len(circle.members)} heard, this node among them)"
    )


def _presumed(heard: LastContacts, circle: PeerGroup, node: str, spell: float) -> float:
    if node in circle.neighbours and node in heard.contacts:
        return heard.contacts[node]
    return max(heard.contacts.get(node, _NEVER), spell)
