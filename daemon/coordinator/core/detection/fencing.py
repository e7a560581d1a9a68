"""Fencing: the end of every rank of a generation is ordered, and it is known when they have ended.

An agent acknowledges a fence. A node whose ranks outlive SIGKILL is taken out of service. A node that left without a
word acknowledges nothing: an agent that hears neither the coordinator nor a majority of its gang for
`SELF_FENCE_AFTER_S` kills its ranks (self-fencing, daemon/agent/failure_detector/silence_rules.py). `ranks_ended_at` is
the coordinator's half of that rule: it computes the moment at which the last such rank is gone, and never names a
moment that is too early.
"""

import re
from collections.abc import Iterable
from math import inf

from muster.daemon.coordinator.core.detection import circuit_breaker, outage
from muster.daemon.coordinator.core.detection.progress_timeouts import CAUSE_WAIT_S
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.observed_state import COORDINATOR, stop_suspecting
from muster.daemon.coordinator.core.state.roster import Member
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.daemon.transport.fencing_timeouts import SELF_FENCE_AFTER_S

KILL_TIMEOUT_S = 10.0
"""Seconds after which a rank that SIGKILL has not ended makes its node UNFIT."""
KILL_MARGIN_S = 0.4
"""Seconds from the moment at which an agent kills its ranks until they are gone."""
MOST_WORDS = 240
"""Characters of what an agent says of them. Slurm shows these in one line."""
_PROCESS_LEFT = re.compile(r"process \d+ \(.{0,15}\) is in state [A-Za-z](, in [\w.]+)?( and \d+ more)?")
"""What an agent writes of processes that SIGKILL has not ended (process_tree.describe_unkilled), separated by "; ".
Other words are the user's: they are no evidence."""
RECHECK_S = 0.05
"""Seconds until the next look at who has carried out the newest order."""


def remove_member(
    gang_turn: GangTurn,
    member: Member,
    reason: str,
    alive: bool,
    left_job: bool = False,
    requested: bool = False,
    program_error: str = "",
) -> None:
    """Remove the member from its gang. If it carries ranks of a live generation, fence that generation first."""
    suspected = gang_turn.observed.suspected_since.get(member.node, gang_turn.now)
    carries = any(seat.node == member.node for seat in gang_turn.gang.roster.seats)
    if carries and gang_turn.gang.phase in (Phase.STARTING, Phase.RUNNING):
        fence_generation(gang_turn, reason, hardware=True, suspected_at=suspected, not_on=member.node)
    gang_turn.turn.record(
        facts.MemberRemoved(
            gang_turn.gang.id,
            member.node,
            reason,
            alive,
            left_job=left_job,
            requested=requested,
            program_error=program_error,
        )
    )
    stop_suspecting(gang_turn.observed, member.node)


def fence_generation(
    gang_turn: GangTurn, cause: str, hardware: bool, suspected_at: float, not_on: str = "", crashed_on: str = ""
) -> None:
    """Order the end of every rank of the running generation."""
    gang = gang_turn.gang
    step = max(
        gang_turn.observed.step_number, gang.restore.restored_version.step if gang.restore.restored_version else 0
    )  # no agent may have reported a step yet
    store = choose_store_node(gang_turn, not_on)
    gang_turn.turn.record(
        facts.GenerationFenced(gang.id, gang.newest.generation, cause, hardware, store, step, suspected_at, crashed_on)
    )


def choose_store_node(gang_turn: GangTurn, not_on: str = "") -> str:
    """The node that shall open the next rendezvous store: the first seat whose agent is in touch, else any such member.
    `not_on`: a node that is about to be removed."""
    seats = [seat.node for seat in gang_turn.gang.roster.seats]
    usable = [m.node for m in gang_turn.usable() if m.node != not_on]
    order = [n for n in seats if n in usable] + [n for n in usable if n not in seats]
    touch = [n for n in order if gang_turn.observed.is_attached(n) and n not in gang_turn.observed.suspected_since]
    return next(iter(touch or order), "")


def phase_observed_since(gang_turn: GangTurn) -> float:
    """Since when this coordinator observes the gang in its present phase: it may have started, or stood still, later
    than the phase began."""
    return max(gang_turn.gang.phase_at, gang_turn.turn.observed.observing_since)


def ranks_ended(gang_turn: GangTurn, member: Member) -> bool:
    """No rank of the fenced generation runs on the member's node, or only its kernel still holds one: the agent has
    acknowledged the fence, or the member was removed because its ranks outlived SIGKILL."""
    outlives_kill = member.removed and gang_turn.now > _kill_timeout_at(gang_turn, member)
    return outlives_kill or gang_turn.has_fenced(member.node)


def _kill_timeout_at(gang_turn: GangTurn, member: Member) -> float:
    """When the agent has had the fence for KILL_TIMEOUT_S; infinite if it is not certain that the fence has arrived.

    It is certain if the stream is open and the coordinator's own probes reach the agent.
    """
    agent = gang_turn.observed.agents.get(member.node)
    reached, reached_at = gang_turn.observed.reachability.get(member.node, (False, gang_turn.now))
    if agent is None or not agent.attached or not reached:
        return inf
    return max(phase_observed_since(gang_turn), agent.attached_at, reached_at) + KILL_TIMEOUT_S


def take_out_if_stuck(gang_turn: GangTurn, member: Member) -> None:
    """Take the node out of service if its ranks outlive SIGKILL. If those on many nodes do, the nodes share a cause:
    none is taken out for CAUSE_WAIT_S, and none is drained."""
    timeout_at = _kill_timeout_at(gang_turn, member)
    if timeout_at == inf:
        return
    if gang_turn.now <= timeout_at:
        gang_turn.turn.tick_at(timeout_at)
    elif not member.removed:
        many = outage.many_stuck(gang_turn)
        if many and gang_turn.now < phase_observed_since(gang_turn) + CAUSE_WAIT_S:
            gang_turn.turn.tick_at(gang_turn.now + outage.RECHECK_S)
            return
        reason = f"ranks on {member.node} could not be killed within {KILL_TIMEOUT_S:.0f} s{_left(gang_turn, member)}"
        if many:
            why = f"{reason}; those on {many} could not, so the nodes share the cause, such as storage"
            gang_turn.turn.record(facts.ActionWithheld(gang_turn.gang.id, member.node, "drain", why))
        else:
            circuit_breaker.drain_if_run_has_node(gang_turn.turn, gang_turn.gang, member, reason)
        remove_member(gang_turn, member, reason, alive=True)


def _left(gang_turn: GangTurn, member: Member) -> str:
    """What the agent says of a process that is left: where in the kernel it waits."""
    tails = [rank.stderr_tail for rank in gang_turn.observed.status(member.node).ranks]
    words = next((tail for tail in tails if all(map(_PROCESS_LEFT.fullmatch, tail.split("; ")))), "")
    return f": {words[:MOST_WORDS]}" if words else ""


def note_known_newcomers(gang_turn: GangTurn) -> None:
    """Note which members the node that carries all ranks knows: it has carried out the newest order. This outlives a
    restart of the coordinator, as the node may not."""
    gang = gang_turn.gang
    if len(gang.roster.seats) != 1:
        return
    newcomers = [member.node for member in gang.roster.present() if member.newcomer]
    if newcomers and gang_turn.observed.status(gang.roster.seats[0].node).order_serial >= gang.order_serial:
        for node in newcomers:
            gang_turn.turn.record(facts.NewcomerKnown(gang.id, node))


def has_heard_of_none(gang_turn: GangTurn, node: str) -> bool:
    """Whether `node` carries all ranks, and has not heard of any other member: all of them are newcomers.

    Its agent does not kill its ranks if none of these answers it, because it alone is a majority of the gang that it
    knows. If several nodes carry ranks, each knows the others.
    """
    roster, others = gang_turn.gang.roster, gang_turn.index.present - {node}
    if len(roster.seats) != 1 or roster.seats[0].node != node or not others:
        return False
    return all(roster.members[other].newcomer for other in others)


def ranks_ended_at(gang_turn: GangTurn) -> float:
    """When the ranks of every node that left in silence have ended for certain (seconds); 0 if no such node is left.

    The ranks of such a node live for as long as a majority answers the node. So every member that may have answered it
    must know that it was removed, and must say when it last treated it as a member.
    """
    gang, index = gang_turn.gang, gang_turn.index
    # Earlier recoveries waited for their own nodes.
    left = gang.recovery.recoveries[-1].nodes_out if gang.recovery.recoveries else []
    others = len(index.present)
    members = [member for node in left if (member := gang.roster.members.get(node)) and not member.alive]
    closed = gang_turn.observed.closed_by
    silent = [one.node for one in members if not _process_ended(closed.get(one.node, set()), others)]
    if not silent:
        return 0.0
    if index.agents_behind(gang, gang_turn.observed):
        return gang_turn.now + RECHECK_S
    if gang_turn.now >= index.time_fenced_at:  # newer reports may move the moment
        reporters = index.reported_since if index.time_fenced_at else gang_turn.observed.agents.keys()
        last_contact_at = max(_last_contact(gang_turn, node, reporters) for node in silent)
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


def _process_ended(closed: set[str], others: int) -> bool:
    """Whether the agent's process has ended for certain, and its ranks with it.

    The kernel of the node itself must have closed the agent's connections to the coordinator and to two other agents
    (to fewer only if the gang has fewer).

    Args:
        closed: witnesses whose connection was closed.
        others: number of other agents in the gang.
    """
    return COORDINATOR in closed and len(closed - {COORDINATOR}) >= min(2, others)
