"""Outages: many nodes silent at once. The cause is a switch, the power of a rack, or the coordinator's own network.

No node is taken out before the cause is told apart, or CAUSE_WAIT_S have passed. An outage hits the whole site, so the
nodes of all gangs count together. The owner of a job can stop all of its agents, and must not hold up the recovery of
another job: a node whose daemon is heard is not silent.
"""

from collections.abc import Set

from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.observed_state import ObservedAgent, ObservedGang, ObservedNode
from muster.daemon.coordinator.core.state.roster import Roster
from muster.daemon.coordinator.core.state.state_tables import FENCING, MONITORED
from muster.daemon.coordinator.core.turn.turn import GangTurn, Turn
from muster.node_health import UNRESPONSIVE

SIMULTANEOUS_S = 10.0
"""Seconds within which nodes that fall silent count as silent at once: about two heartbeat timeouts of a node."""

DAEMON_HEARD_S = 6.0
"""Seconds for which the last word of a node's daemon shows that the node is not silent: a heartbeat comes every 5 s."""

RECHECK_S = 1.0
"""Seconds until the next look at how many nodes are silent or stuck, while a node waits for that."""

STUCK_AFTER_S = 5.0
"""Seconds after SIGKILL from which a live rank counts as one that can't be killed."""


def chance_limit(state: DurableState, roster: Roster) -> int:
    """Number of nodes that may fall silent at once by chance."""
    return max(2, max(len(state.nodes), len(roster.members)) // 10)


def many_silent(gang_turn: GangTurn, node: str) -> bool:
    """With `node`, more nodes than fail by chance are silent now, or were found silent within SIMULTANEOUS_S.

    Called only when `node` is about to be taken out: it looks at every gang if the gang's own nodes do not settle it.
    """
    turn = gang_turn.turn
    most, found = chance_limit(turn.state, gang_turn.gang.roster), {node} | _silent(turn, gang_turn.observed)
    if len(found) <= most:
        out = [turn.state.node(name) for name in turn.index.out_of_service]
        found |= {n.name for n in out if n.health in UNRESPONSIVE and turn.now - n.judged_at < SIMULTANEOUS_S}
    return len(found) > most or _others_silent(turn, found, most)


def _silent(turn: Turn, gang: ObservedGang) -> set[str]:
    """The suspected nodes of a gang, without those whose daemon is heard. A suspicion ends as soon as the agent
    answers."""
    return {
        node
        for node, since in gang.suspected_since.items()
        if not is_daemon_heard(turn.observed.node(node), since, turn.now)
    }


def is_daemon_heard(daemon: ObservedNode, since: float, now: float) -> bool:
    """The daemon was heard later than `since`, for the last time in the last DAEMON_HEARD_S, and no probe has found its
    process gone after that."""
    return max(daemon.heard_at, daemon.answered_at) > max(since, daemon.unanswered_at, now - DAEMON_HEARD_S)


def _others_silent(turn: Turn, found: set[str], most: int) -> bool:
    """Together with the silent nodes of other gangs, `found` holds more than `most` nodes."""
    for gang in turn.state.gangs.values():
        seen = turn.observed.gangs.get(gang.id)
        if seen is not None and seen.suspected_since and gang.phase in MONITORED:
            found |= _silent(turn, seen)
            if len(found) > most:
                return True
    return False


def many_stuck(gang_turn: GangTurn) -> str:
    """Says in words where ranks outlive SIGKILL: on most nodes of the gang, or on more nodes of the site than fail by
    chance; empty: on neither. Such ranks wait for something that all share, such as storage. Storage that comes back
    releases one node after another, so the words hold for STUCK_AFTER_S.

    Called only when such a node is about to be blamed.
    """
    turn, roster, now = gang_turn.turn, gang_turn.gang.roster, gang_turn.now
    found: set[str] = set()
    for gang in turn.state.gangs.values():
        if gang.phase in FENCING and now - gang.phase_at > STUCK_AFTER_S:
            found |= _stuck(turn.observed.gang(gang.id), turn.index.of(gang).unfenced, now)
    if len(found & {seat.node for seat in roster.seats}) > max(1, len(roster.seats) // 2):
        gang_turn.observed.many_stuck_at = now
    if len(found) > chance_limit(turn.state, roster):
        turn.observed.many_stuck_at = now
    if now - gang_turn.observed.many_stuck_at < STUCK_AFTER_S:
        return "most nodes of this job"
    return "many nodes of the site" if now - turn.observed.many_stuck_at < STUCK_AFTER_S else ""


def _stuck(seen: ObservedGang, unfenced: Set[str], now: float) -> set[str]:
    """Nodes whose agent is reached, or was until SIMULTANEOUS_S ago, and that have not acknowledged the fence."""
    reached = (node for node in unfenced if seen.reachability.get(node, (False, 0.0))[0])
    return {node for node in reached if _in_touch(seen.agents.get(node), now)}


def _in_touch(agent: ObservedAgent | None, now: float) -> bool:
    return agent is not None and (agent.attached or now - agent.gone_at < SIMULTANEOUS_S)
