"""Many nodes silent at once: a switch, a rack's power, or the observer's own trouble. Nothing is done to any of them
before the cause is told apart, or a minute has passed.

What befalls a site is no gang's affair alone: all gangs' nodes count together.
"""

from muster.daemon.coordinator.core.state.state_tables import FENCING, MONITORED, UNRESPONSIVE
from muster.daemon.coordinator.core.state.turn import GangTurn

SIMULTANEOUS_S = 10.0
"""Two leases: nodes that fall silent within this count as falling silent at once."""

STUCK_AFTER_S = 5.0
"""Ranks that still live so long after they were killed count as such that can't be."""


def chance_limit(gang_turn: GangTurn) -> int:
    """So many nodes may fall silent at once by chance."""
    return max(2, max(len(gang_turn.turn.state.nodes), len(gang_turn.gang.members)) // 10)


def many_silent(gang_turn: GangTurn) -> bool:
    """More nodes than fail by chance are silent, or were found so just now. Asked only when one is about to be taken:
    it looks at every gang where the gang's own nodes do not settle it."""
    most, found = chance_limit(gang_turn), set(gang_turn.observed.suspected_since)  # who answers is cleared at once
    if len(found) <= most:
        out = [gang_turn.turn.state.node(name) for name in gang_turn.turn.index.out_of_service]
        found |= {n.name for n in out if n.health in UNRESPONSIVE and gang_turn.now - n.judged_at < SIMULTANEOUS_S}
    return len(found) > most or _others_silent(gang_turn, found, most)


def _others_silent(gang_turn: GangTurn, found: set[str], most: int) -> bool:
    """With those whom other gangs' agents, or the coordinator, miss they are more."""
    for gang in gang_turn.turn.state.gangs.values():
        seen = gang_turn.turn.observed.gangs.get(gang.id)
        if seen is not None and seen.suspected_since and gang.phase in MONITORED:
            found |= seen.suspected_since.keys()
            if len(found) > most:
                return True
    return False


def many_stuck(gang_turn: GangTurn) -> bool:
    """Ranks outlive their fence on more nodes than fail by chance: it is what all of them wait for, such as shared
    storage, that stands still. Asked only when one of these nodes is about to be judged."""
    found: set[str] = set()
    for gang in gang_turn.turn.state.gangs.values():
        if gang.phase in FENCING and gang_turn.now - gang.phase_at > STUCK_AFTER_S:
            found |= _stuck(GangTurn(gang_turn.turn, gang))
    return len(found) > chance_limit(gang_turn)


def _stuck(gang_turn: GangTurn) -> set[str]:
    """Nodes whose agents are reached, or were until just now, and do not say that their ranks have ended."""
    reached = gang_turn.observed.reachability
    return {
        node for node in gang_turn.index.unfenced if _in_touch(gang_turn, node) and reached.get(node, (False, 0.0))[0]
    }


def _in_touch(gang_turn: GangTurn, node: str) -> bool:
    agent = gang_turn.observed.agents.get(node)
    return agent is not None and (agent.attached or gang_turn.now - agent.gone_at < SIMULTANEOUS_S)
