"""Fencing by time: when the ranks of nodes that left without a word have ended.

An agent that hears neither the coordinator nor a majority of its gang for `SELF_FENCE_AFTER_S` kills its ranks
(daemon/agent/failure_detector/silence_rules.py). This module is the coordinator's half of that rule.
"""

from collections.abc import Iterable

from muster.daemon.coordinator.core.detection.probe_result import process_ended
from muster.daemon.coordinator.core.state.durable_state import Member
from muster.daemon.coordinator.core.state.turn import GangTurn
from muster.daemon.transport.fencing_timeouts import SELF_FENCE_AFTER_S

KILL_MARGIN_S = 0.4
"""From that moment until its ranks are gone."""
RECHECK_S = 0.05
"""How soon it is looked again whether all have carried out the newest order."""


def ranks_ended_at(gang_turn: GangTurn) -> float:
    """When the ranks of every node that left in silence have ended for certain.

    Such a node lets its ranks live for as long as a majority answers it. So all who may have answered it must know that
    it is out, and say when they last took it for a member.
    """
    gang, index = gang_turn.gang, gang_turn.index
    left = gang.recoveries[-1].nodes_out if gang.recoveries else []  # who left earlier was waited for then
    others = len(index.present)
    silent = [m for node in left if (m := gang.members.get(node)) and not m.alive and not _ended(gang_turn, m, others)]
    if not silent:
        return 0.0
    if index.agents_behind(gang, gang_turn.observed):
        return gang_turn.now + RECHECK_S
    if gang_turn.now >= index.time_fenced_at:  # what was reported since is looked at before anything starts
        speakers = index.reported_since if index.time_fenced_at else gang_turn.observed.agents.keys()
        last_contact_at = max(_last_contact(gang_turn, member.node, speakers) for member in silent)
        quiet_at = last_contact_at + SELF_FENCE_AFTER_S + KILL_MARGIN_S
        index.time_fenced_at = max(index.time_fenced_at, quiet_at)
        index.reported_since.clear()
    return index.time_fenced_at


def _last_contact(gang_turn: GangTurn, node: str, speakers: Iterable[str]) -> float:
    """When any of these agents, or the coordinator, may last have answered `node`."""
    # Its ranks did not run before the generation did, and count the silence from their start on.
    last = max(gang_turn.turn.observed.agent_heard_at(gang_turn.gang.id, node), gang_turn.gang.started_at)
    for agent in [agent for name in speakers if (agent := gang_turn.observed.agents.get(name))]:
        ages = [said[node] for said in (agent.status.heard_s, agent.status.answered_s) if node in said]
        if ages and agent.node != node:
            last = max(last, agent.reported_at - min(ages))
    return last


def _ended(gang_turn: GangTurn, member: Member, others: int) -> bool:
    return process_ended(gang_turn.observed.closed_by.get(member.node, set()), others)
