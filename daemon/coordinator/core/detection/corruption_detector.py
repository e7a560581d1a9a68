"""The corruption detector: replicas that must be equal are not, or a copy of a shard has changed.

The commit leader compares digests that the agents have made anyway (`replica_agreement` in the checkpoint library). A
version on which replicas disagree is void there, so it never becomes a restore point. What follows is decided in
`running`. Who is named:

1. A minority of three replicas or more, on one node, names that node.
2. Without a majority (two replicas), or with a minority on several nodes, all of them are suspects and nobody is named.
3. If replicas disagree again before the gang has come further, the cause is repeated with the steps: the script lets
   replicas differ, or a node without a spare is broken. Then the comparison ends for this run, and the gang goes on.

Only the user's own processes report here. So the node keeps its health, Slurm drains nothing, and no other job hears of
it.

A copy of a shard that does not match its digests is recorded, and its agent uses it no more. It accuses nobody either.
"""

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import ReplicaDisagreement
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.generations import Disagreement
from muster.daemon.coordinator.core.state.observed_state import ObservedGang
from muster.daemon.coordinator.core.state.roster import Roster
from muster.daemon.coordinator.core.turn.gang_index import GangIndex
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.wording import listed

MOST_DISAGREEMENTS = 8
"""How often replicas may disagree in a run before the comparison ends. Each time costs a restart: a node that corrupts
its memory so often has had a spare by then, or there is none."""
MOST_CORRUPT_COPIES = 64
"""Corrupt copies of a run that are recorded. An owner's agent could name others without end."""


def detect_corruption(gang_turn: GangTurn) -> facts.ReplicasDisagreed | None:
    """Record a disagreement that the commit leader reports, once. Returns it; None if there is no new one.

    Once the comparison has ended, nothing more is recorded in this run: nobody is fenced for it, so an owner's agent
    could add records without end.
    """
    gang, seen = gang_turn.gang, gang_turn.observed
    found, before = _reported(gang, gang_turn.index, seen), gang.findings.disagreement
    if found is None or (before is not None and (before.comparison_ends or before.version == found.version)):
        return None
    nodes = _nodes_of(gang.roster, gang.spec.ranks_per_node, found)
    node = nodes[0] if found.majority and len(nodes) == 1 else ""
    why_over = _why_comparison_ends(before, _agreed_step(gang.roster, seen), gang_turn.turn.limits.observe)
    reason = _words(found, nodes, node) + (f"; {why_over}" if why_over else "")
    fact = facts.ReplicasDisagreed(
        gang.id, gang.newest.generation, found.version, found.ranks, nodes, node, reason, bool(why_over)
    )
    gang_turn.turn.record(fact)
    return fact


def note_corrupt_copies(gang_turn: GangTurn) -> None:
    """Record each corrupt copy that an agent reports, once; after the first `MOST_CORRUPT_COPIES` of a run none."""
    gang = gang_turn.gang
    if not gang_turn.index.corrupt or len(gang.findings.corrupt_copies) >= MOST_CORRUPT_COPIES:
        return
    found = [
        facts.CorruptCopyFound(gang.id, node, copy)
        for node in sorted(gang_turn.index.corrupt)
        for copy in gang_turn.observed.status(node).corrupt_copies
    ]
    known = set(gang.findings.corrupt_copies)
    new = [fact for fact in dict.fromkeys(found) if fact not in known]
    for fact in new[: MOST_CORRUPT_COPIES - len(known)]:
        gang_turn.turn.record(fact)


def _reported(gang: Gang, index: GangIndex, seen: ObservedGang) -> ReplicaDisagreement | None:
    """What the commit leader of the running generation, the agent on the node of rank 0, has found."""
    for leader in index.disagreeing:
        found = seen.status(leader).disagreement
        if found is not None and found.ranks and max(found.ranks) < gang.ranks:
            return found
    return None


def _nodes_of(roster: Roster, ranks_per_node: int, found: ReplicaDisagreement) -> tuple[str, ...]:
    """The nodes of the ranks that are named, in the order of their ranks."""
    group_ranks = {rank // ranks_per_node for rank in found.ranks}
    seats = sorted(roster.seats, key=lambda seat: seat.group_rank)
    return tuple(seat.node for seat in seats if seat.group_rank in group_ranks)


def _words(found: ReplicaDisagreement, nodes: tuple[str, ...], node: str) -> str:
    several = len(found.ranks) > 1
    ranks = f"{'ranks' if several else 'rank'} {listed(map(str, found.ranks))} on {listed(nodes)}"
    where = f"the parameters or optimizer states of step {found.version.step}"
    if node:
        others = found.replicas - len(found.ranks)
        verb = "differ" if several else "differs"
        return f"silent data corruption: {ranks} {verb} from {others} equal replicas in {where}"
    if found.majority:
        return f"replicas disagree: {ranks} differ from the majority in {where}, and no single node explains that"
    return f"replicas disagree: {ranks} differ in {where}, and nobody can tell which are right"


def _why_comparison_ends(before: Disagreement | None, agreed_step: int, observe: bool) -> str:
    """Why replicas of this run are no longer compared, now that they disagree again; empty if they still are.

    `agreed_step`: the newest step on which all of them agree. `observe`: Muster is in observe mode.
    """
    if observe:
        return "observe mode: the ranks would restart from the last version on which all agreed"
    if before is None:
        return ""
    if agreed_step < before.version.step:
        return "this is repeated after a restart, so replicas of this run are no longer compared"
    if before.count + 1 >= MOST_DISAGREEMENTS:
        return f"this is the {before.count + 1}th time, so replicas of this run are no longer compared"
    return ""


def _agreed_step(roster: Roster, seen: ObservedGang) -> int:
    """The newest committed step: all replicas that are compared agree on it."""
    statuses = [seen.status(seat.node) for seat in roster.seats]
    return max((status.committed.step for status in statuses if status.committed is not None), default=0)
