"""Muster resumes a node that it has drained itself, once the node has passed a check (`resume_after_check`).

The node's daemon makes the check, as root and beside no job: agents of users prove nothing. A check is asked for once
after the verdict, and once after each boot. A node stays drained until somebody resumes it if somebody else had drained
it before, or has changed its reason in Slurm since; if it is a lemon; or if it failed within a day after Muster had
resumed it.
"""

from muster.daemon.coordinator.core.detection import drain_reason, failure_rate
from muster.daemon.coordinator.core.detection.drain_reason import DrainSource
from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.coordinator.core.state.durable_state import DurableState, Node
from muster.daemon.coordinator.core.state.events import CheckOutcome, NodeCheck
from muster.daemon.coordinator.core.state.limits import Limits
from muster.daemon.coordinator.core.state.observed_state import ObservedState
from muster.daemon.coordinator.core.turn.state_updates import LIMIT_WINDOW_S
from muster.daemon.coordinator.core.turn.turn import Turn
from muster.node_health import RESUMABLE


def wanted_check(state: DurableState, observed: ObservedState, limits: Limits, name: str, now: float) -> str:
    """The check that the daemon of the node shall make, by its name; empty: none."""
    node = state.nodes.get(name)
    if node is None or not _may_resume(state, observed, limits, node, now):
        return ""
    request = f"{node.judged_at:.3f} {node.boot_id}"
    return request if request != node.check_request else ""


def take_check(turn: Turn, reported: events.NodeCheckReported) -> None:
    """Record a check that was asked for. If the node has passed it, have Slurm resume the node."""
    wanted = wanted_check(turn.state, turn.observed, turn.limits, reported.node, turn.now)
    if not wanted or reported.request != wanted:
        return
    turn.record(facts.NodeChecked("", reported.node, 0, reported.check, reported.request))
    if _has_passed(reported.check):
        turn.owe("resume", "", 0, turn.state.node(reported.node).drained_as, node=reported.node)


def _may_resume(state: DurableState, observed: ObservedState, limits: Limits, node: Node, now: float) -> bool:
    """Muster may resume the node if it passes a check."""
    return node.health in RESUMABLE and not why_not(state, observed, limits, node, now)


def why_not(state: DurableState, observed: ObservedState, limits: Limits, node: Node, now: float) -> str:
    """Why Muster does not resume a node that is out of service, even if it passes a check, in words; empty: it does."""
    if not limits.resume_after_check or limits.observe:
        return "the site leaves that to its operators"
    if node.drain is not None:
        return "an operator has drained it"
    if node.failed_again:
        return "it failed again within a day after Muster had resumed it"
    if failure_rate.is_lemon(failure_rate.failures(state, node.name, now), limits.lemon_after):
        return "it is a lemon"
    if state.owes_for_node(node.name):
        return "a call to Slurm about it is under way"
    if not _is_drained_by_muster(observed, node):
        return "in Slurm it has another reason than Muster's, or a job is left on it"
    if _resumed_lately(state, now) >= limits.nodes_per_hour:
        return "as many nodes as the site's limit allows were resumed within an hour"
    return ""


def _is_drained_by_muster(observed: ObservedState, node: Node) -> bool:
    """Slurm shows the reason that Muster wrote for evidence against the node, and nothing of a job is left there."""
    seen = observed.nodes.get(node.name)
    drain, reason = seen.drain if seen is not None else None, drain_reason.parse(node.drained_as)
    if drain is None or not drain.idle or reason is None or reason.source is not DrainSource.NODE:
        return False
    return drain_reason.is_same(drain.reason, node.drained_as)


def _resumed_lately(state: DurableState, now: float) -> int:
    """How many nodes Muster has resumed within the hour, or is about to resume."""
    owed = sum(call.verb == "resume" for call in state.owed.values())
    return owed + sum(node.resumed_at > 0 and now - node.resumed_at < LIMIT_WINDOW_S for node in state.nodes.values())


def _has_passed(check: NodeCheck) -> bool:
    """Something was computed, and nothing was wrong or slow. An inventory alone proves nothing."""
    return check.outcome is CheckOutcome.PASSED and check.gflops > 0
