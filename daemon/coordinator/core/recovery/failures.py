"""Failures of the software: ranks that crash, and agents that report an error which no order mends."""

from collections.abc import Mapping

from muster.daemon.coordinator.core.detection import attribution, fencing
from muster.daemon.coordinator.core.recovery import gang_end
from muster.daemon.coordinator.core.state.events import RankState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.roster import Roster
from muster.daemon.coordinator.core.state.state_tables import ACTIVE, Phase
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.exit_codes import EXIT_AGENT
from muster.wording import listed

SLURM_ANSWER_S = 5.0
"""Seconds within which Slurm's end of a job is known. Slurm's view of a job is read every 2 s."""
REASON_LENGTH = 200
"""Characters of what a rank has written that a reason quotes."""
_SIGNALS_OF_LIMITS = {
    24: " (SIGXCPU: its limit of processor time, ulimit -t of the shell that submitted)",
    25: " (SIGXFSZ: its limit of a file's size, ulimit -f of the shell that submitted)",
}
"""Slurm passes the limits of the submitting shell on to all processes of a job. Login nodes have such limits."""


def fence_if_ranks_crashed(gang_turn: GangTurn) -> bool:
    """End a generation of which a rank has failed. True: nothing else may be decided now."""
    index = gang_turn.index
    if not index.crashed:
        return False
    seen, generation = gang_turn.observed, gang_turn.gang.newest.generation
    nodes = sorted(index.crashed, key=lambda node: index.seats[node].group_rank)
    ranks = [(node, rank) for node in nodes for rank in seen.status(node).ranks_of(generation)]
    failed = [one for node, rank in ranks if (one := attribution.exit_of(seen.agents[node], node, rank)).failed]
    if attribution.may_have_failed_earlier_elsewhere(gang_turn, failed):
        return True  # `failure_detector.examine` suspects the agents that do not come
    # An agent that has fenced the running generation by itself was cut off: not a fault of the software, unless a rank
    # of it had crashed.
    crashed = [one for one in failed if one.by_fault_of_its_own or seen.status(one.node).fenced_generation < generation]
    if crashed:
        # A script that fails during a planned stop is not at fault.
        first = attribution.first_to_fail(crashed)
        stops = gang_turn.gang.plans.stop is not None
        fencing.fence_generation(
            gang_turn,
            _exit_reason(first.node, first.rank),
            hardware=stops,
            suspected_at=gang_turn.now,
            crashed_on=first.node,
        )
    else:
        words = "was cut off from the coordinator and most of its gang, or suspended, and has ended its ranks"
        words = f"{failed[0].node} {words}"
        fencing.fence_generation(gang_turn, words, hardware=True, suspected_at=gang_turn.now)
    return True


def _exit_reason(node: str, rank: RankState) -> str:
    code = rank.exit_code or 0
    how = f"was ended by signal {-code}{_SIGNALS_OF_LIMITS.get(-code, '')}" if code < 0 else f"exited with {code}"
    cause = attribution.cause_in(rank.stderr_tail)
    shown = cause if len(cause) <= REASON_LENGTH else f"{cause[: REASON_LENGTH - 3]}..."
    return f"rank {rank.rank} on {node} {how}" + (f": {shown}" if shown else "")


def are_agents_failing(gang_turn: GangTurn) -> bool:
    """Handle agents that report an error which no order mends. True: nothing else may be decided now.

    If most agents have failed, the job is the cause, and the gang ends. A few are removed as any node that can't carry
    ranks. An agent that got SIGTERM will end as well; if most agents got SIGTERM, a stop is planned. So Slurm's word is
    awaited first.
    """
    gang, index, seen = gang_turn.gang, gang_turn.index, gang_turn.observed
    failing = index.agent_failed | index.sigterm_received
    if not failing or gang.plans.stop is not None or gang.phase not in ACTIVE | {Phase.GATHERING}:
        seen.agent_failure_since = 0.0
        return False
    seen.agent_failure_since = seen.agent_failure_since or gang_turn.now
    if gang_turn.now - seen.agent_failure_since < SLURM_ANSWER_S:
        gang_turn.turn.tick_at(seen.agent_failure_since + SLURM_ANSWER_S)
        return True
    words = {node: seen.status(node).failure or seen.status(node).sigterm_notice for node in sorted(failing)}
    if _too_many(gang, len(words), len(index.present)):
        gang_end.end_gang(gang_turn, Phase.FAILED, EXIT_AGENT, _first_failure(gang.roster, words))
        return True
    for node, reason in words.items():
        fencing.remove_member(gang_turn, gang.roster.members[node], f"{node}: {reason}", alive=True)
    return False


def _first_failure(roster: Roster, words: Mapping[str, str]) -> str:
    """The first error, with all nodes that have reported it, those that were removed for it too."""
    first = next(iter(words.values()))
    nodes = {node for node, reason in words.items() if reason == first}
    nodes |= {m.node for m in roster.members.values() if m.removed and m.removal_reason == f"{m.node}: {first}"}
    return f"{listed(sorted(nodes, key=lambda node: (len(node), node)), ', ')}: {first}"


def _too_many(gang: Gang, failing: int, present: int) -> bool:
    """So many failing agents are most of the gang, or leave too few nodes to begin with. While the gang gathers, nodes
    that have not attached count as nodes, and members that were removed for the same cause count as failing."""
    if gang.phase is not Phase.GATHERING:
        return 2 * failing > present
    nodes = max(len(gang.roster.members), len(gang.slurm.job_nodes) or gang.spec.nodes + gang.spec.spares)
    failing += sum(member.removed for member in gang.roster.members.values())
    return 2 * failing > nodes or nodes - failing < gang.spec.fewest
