"""An allocation in which groups would lie wider than the job asks, found before the first generation of a run starts.

Slurm may hand out such nodes: it gives up the wait for `--switches` after a time. Then the job does what
placement.if_not_available of job.toml says:

wait    The nodes go back, and the job waits in Slurm's queue for the same request, whose wait for switches begins
        again. Each time the job loses its place in the queue. So this happens `retries` times in a row at most; then
        the job starts all the same or, if a required group is among them, ends.
shrink  The gang starts with fewer data-parallel replicas, as many as are packed. The other nodes are spares. If not
        even one replica is packed, or a checkpoint of all replicas exists, the job waits.
relax   The gang starts. The fact of its start names the groups, and what that costs.

Later generations of the run always start: a swap that makes a group wider is better than a job without nodes.
"""

from dataclasses import replace

from muster.daemon.coordinator.core.detection import node_checks
from muster.daemon.coordinator.core.recovery import gang_end, requeueing
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import GangSpec, IfWorse
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn import placement
from muster.daemon.coordinator.core.turn.communication import communicating_seats, communication_times, wider_than_asked
from muster.daemon.coordinator.core.turn.turn import GangTurn
from muster.exit_codes import EXIT_NOT_PACKED


def respond(gang_turn: GangTurn) -> bool:
    """Give the nodes back, shrink or end the gang if its groups would lie wider than asked. False: it may start."""
    gang, spec = gang_turn.gang, gang_turn.gang.spec
    if spec.if_worse is IfWorse.START or gang_turn.turn.limits.observe:
        return False
    wider = _wider(gang_turn, spec)
    if not wider:
        return False
    if spec.if_worse is IfWorse.SHRINK and (smaller := _largest_packed(gang_turn)):
        words = f"{wider}; {smaller} of {spec.nodes} nodes hold whole data-parallel replicas as the job asks"
        gang_turn.turn.record(facts.GangShrunk(gang.id, smaller, words))
        return True
    wider = f"{wider}; {communication_times(spec, _first_seats(gang_turn, spec), gang_turn.fabric).words}"
    if spec.requeue and gang.slurm.runs_given_back < spec.retries:
        words = f"{wider}; the job gives these nodes back ({gang.slurm.runs_given_back + 1} of {spec.retries}): requeue"
        requeueing.requeue(gang_turn, words, given_back=True)
        return True
    if required := _wider(gang_turn, _with_required_only(spec)):
        tried = f"no better nodes came in {gang.slurm.runs_given_back + 1} runs: raise placement.retries, or prefer"
        if not spec.requeue:
            tried = "the job may not be requeued for better nodes: set requeue, or prefer"
        words = f"{required}, which [placement] requires; {tried}"
        gang_end.end_gang(gang_turn, Phase.FAILED, EXIT_NOT_PACKED, words)
        return True
    return False


def _wider(gang_turn: GangTurn, spec: GangSpec) -> str:
    return wider_than_asked(spec, _first_seats(gang_turn, spec), gang_turn.fabric)


def _first_seats(gang_turn: GangTurn, spec: GangSpec) -> list[str]:
    usable, last_choices = (
        [member.node for member in gang_turn.usable()],
        node_checks.last_choices(gang_turn),
    )
    groups = communicating_seats(spec)
    return placement.first_seats(
        gang_turn.fabric, usable, spec.nodes, last_choices, groups, spec.spread_spares, gang_turn.own_nodes
    )


def _with_required_only(spec: GangSpec) -> GangSpec:
    """The job without its preferences."""
    traffic = tuple(one if one.required else replace(one, packed_in="any") for one in spec.traffic)
    return replace(spec, traffic=traffic)


def _largest_packed(gang_turn: GangTurn) -> int:
    """The largest of the job's smaller numbers of nodes with which no group lies wider than asked. 0: there is none.

    By bisection: a smaller gang is never harder to pack.
    """
    gang, sizes, best = gang_turn.gang, gang_turn.gang.spec.smaller, 0
    if gang.newest.generation or gang.checkpoint.durable_path:
        return 0  # the state of all replicas was written by another number of ranks
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        if _wider(gang_turn, replace(gang.spec, nodes=sizes[middle])):
            high = middle
        else:
            best, low = sizes[middle], middle + 1
    return best
