"""Fencing by time: when the ranks of nodes that left without a word have ended.

An agent that hears neither the coordinator nor a majority of its gang for `SELF_FENCE_AFTER_S` kills its ranks
(self-fencing, daemon/agent/failure_detector/silence_rules.py). This module is the coordinator's half of that rule: it
computes the moment at which the last such rank is gone, and never names a moment that is too early.
"""

from collections.abc import Iterable

from muster.daemon.coordinator.core.detection.probe_result import process_ended
from muster.daemon.coordinator.core.state.roster import Member
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.daemon.transport.fencing_timeouts import SELF_FENCE_AFTER_S

KILL_MARGIN_S = 0.4
"""Seconds from the moment at which an agent kills its ranks until they are gone."""
RECHECK_S = 0.05
"""Seconds until the next look at who has carried out the newest order."""


def ranks_ended_at(gang_turn: GangTurn) -> float:
    """When the ranks of every node that left in silence have ended for certain (seconds); 0 if no such node is left.

    The ranks of such a node live for as long as a majority answers the node. So every member that may have answered it
    must know that it was removed, and must say when it last treated it as a member.
    """
    gang, index = gang_turn.gang, gang_turn.index
    # Earlier recoveries waited for their own nodes.
    left = gang.recovery.recoveries[-1].nodes_out if gang.recovery.recoveries else []
    others = len(index.present)
    silent = [
        m for node in left if (m := gang.roster.members.get(node)) and not m.alive and not _ended(gang_turn, m, others)
    ]
    if not silent:
        return 0.0
    if index.agents_behind(gang, gang_turn.observed):
        return gang_turn.now + RECHECK_S
    if gang_turn.now >= index.time_fenced_at:  # newer reports may move the moment
        reporters = index.reported_since if index.time_fenced_at else gang_turn.observed.agents.keys()
        last_contact_at = max(_last_contact(gang_turn, member.node, reporters) for member in silent)
        quiet_at = last_contact_at + SELF_FENCE_AFTER_S + KILL_MARGIN_S
        index.time_fenced_at = max(index.time_fenced_at, quiet_at)
        index.reported_since.clear()
    return index.time_fenced_at


def _last_contact(gang_turn: GangTurn, node: str, reporters: Iterable[str]) -> float:
    """When any of the reporting agents, or the coordinator, may last have answered `node` (seconds)."""
    # The ranks count the silence from the start of their generation.
    last = max(gang_turn.turn.observed.agent_heard_at(gang_turn.gang.id, node), gang_turn.gang.newest.started_at)
    for agent in [agent for name in reporters if (agent := gang_turn.observed.agents.get(name))]:
        ages = [said[node] for said in (agent.status.heard_s, agent.status.answered_s) if node in said]
        if ages and agent.node != node:
            last = max(last, agent.reported_at - min(ages))
    return last


def _ended(gang_turn: GangTurn, member: Member, others: int) -> bool:
    return process_ended(gang_turn.observed.closed_by.get(member.node, set()), others)
