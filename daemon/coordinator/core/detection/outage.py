"""Many nodes silent at once: a switch, a rack's power, or the observer's own trouble. Nothing is done to any of them
before the cause is told apart, or a minute has passed.

What befalls a site is no gang's affair alone: all gangs' nodes count together.
"""

from muster.daemon.coordinator.core.state.state_tables import FENCING, SILENT, WATCHED
from muster.daemon.coordinator.core.state.turn import GangTurn

WINDOW_S = 10.0
"""Two leases: nodes that fall silent within this count as falling silent at once."""

LATE_S = 5.0
"""Ranks that still live so long after they were killed count as such that can't be."""


def few(gt: GangTurn) -> int:
    """So many nodes may fall silent at once by chance."""
    return max(2, max(len(gt.turn.ledger.nodes), len(gt.gang.members)) // 10)


def many_silent(gt: GangTurn) -> bool:
    """More nodes than fail by chance are silent, or were found so just now. Asked only when one is about to be taken:
    it looks at every gang where the gang's own nodes do not settle it."""
    most, found = few(gt), set(gt.seen.suspected)  # who answers is cleared at once
    if len(found) <= most:
        out = [gt.turn.ledger.node(name) for name in gt.turn.tallies.out]
        found |= {n.name for n in out if n.verdict in SILENT and gt.now - n.judged_at < WINDOW_S}
    return len(found) > most or _others_silent(gt, found, most)


def _others_silent(gt: GangTurn, found: set[str], most: int) -> bool:
    """With those whom other gangs' agents, or the coordinator, miss they are more."""
    for gang in gt.turn.ledger.gangs.values():
        seen = gt.turn.sight.gangs.get(gang.id)
        if seen is not None and seen.suspected and gang.phase in WATCHED:
            found |= seen.suspected.keys()
            if len(found) > most:
                return True
    return False


def many_stuck(gt: GangTurn) -> bool:
    """Ranks outlive their fence on more nodes than fail by chance: it is what all of them wait for, such as shared
    storage, that stands still. Asked only when one of these nodes is about to be judged."""
    found: set[str] = set()
    for gang in gt.turn.ledger.gangs.values():
        if gang.phase in FENCING and gt.now - gang.phase_at > LATE_S:
            found |= _stuck(GangTurn(gt.turn, gang))
    return len(found) > few(gt)


def _stuck(gt: GangTurn) -> set[str]:
    """Nodes whose agents are reached, or were until just now, and do not say that their ranks have ended."""
    reached = gt.seen.own_probes
    return {node for node in gt.tally.unfenced if _in_touch(gt, node) and reached.get(node, (False, 0.0))[0]}


def _in_touch(gt: GangTurn, node: str) -> bool:
    agent = gt.seen.agents.get(node)
    return agent is not None and (agent.attached or gt.now - agent.gone_at < WINDOW_S)
