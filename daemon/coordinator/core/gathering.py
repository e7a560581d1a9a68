"""From Slurm's start of the job to the gang's: its agents attach, and who of them is waited for."""

from collections.abc import Collection

from muster.daemon.coordinator.core import ends, leaving, placement, requeues
from muster.daemon.coordinator.core import facts as f
from muster.daemon.coordinator.core.ledger import Gang
from muster.daemon.coordinator.core.states import Phase
from muster.daemon.coordinator.core.turn import GangTurn

SPARE_WAIT_S = 30.0
"""How long a complete set of rank nodes waits for its spares before it starts without."""
LAUNCH_S = 120.0
"""srun has given up a node that does not answer by then: in 40 s with a MessageTimeout of 10 s, Slurm's default."""
LOOK_S = 1.0
"""So often it is looked who is silent, while a complete set of nodes waits."""


def await_agents(gt: GangTurn) -> None:
    """A job that runs while no agent of it attaches will not gather."""
    gang = gt.gang
    if gt.seen.granted is None:
        return
    restarts, since = gt.seen.granted
    if gang.phase is Phase.REQUEUED and restarts <= gang.restart_count:
        return  # Slurm has not taken it back yet
    if gt.now - since > gang.spec.gather_timeout_s:
        ends.end(gt, Phase.FAILED, ends.EXIT_NEVER_GATHERED, _missing(gang, []))
    else:
        gt.turn.wake(since + gang.spec.gather_timeout_s + 0.01)


def gather(gt: GangTurn) -> None:
    """Start the gang once all have attached whom it waits for; see that it does not wait in vain."""
    gang, spec = gt.gang, gt.gang.spec
    if gang.stop is not None:
        leaving.leave(gt)
        return
    since = max(gang.phase_at, gt.turn.sight.since)  # after a restart every agent has to attach anew
    waited = gt.now - since
    here = len(gt.tally.here)
    if _never_enough(gt):
        requeues.no_nodes(gt, requeues.few_words(gt))
    elif here < spec.nodes and _nobody_launches(gt):
        requeues.no_nodes(gt, f"{here} agents have attached, and their batch host is lost, which started them")
    elif here >= _awaited_nodes(gt, waited):
        _call_roll(gt)
    elif waited > spec.gather_timeout_s and (dead := requeues.dead(gt)) and spec.requeue and not gt.turn.limits.observe:
        requeues.requeue(gt, f"neither agent nor daemon is heard of {', '.join(dead)}", dead)
    elif waited > spec.gather_timeout_s:
        ends.end(gt, Phase.FAILED, ends.EXIT_NEVER_GATHERED, _missing(gang, gt.tally.here))
    else:
        complete = here >= spec.nodes
        gt.turn.wake(gt.now + LOOK_S if complete else since + spec.gather_timeout_s)


def _awaited_nodes(gt: GangTurn, waited: float) -> int:
    """So many nodes start the gang after `waited` seconds."""
    spec = gt.gang.spec
    if waited > spec.gather_timeout_s and not gt.turn.limits.observe:
        return spec.fewest
    long = LAUNCH_S if _srun_waits(gt) else SPARE_WAIT_S
    return spec.nodes if waited > min(long, spec.gather_timeout_s) else spec.nodes + spec.spares


def _srun_waits(gt: GangTurn) -> bool:
    """A node hangs that srun still tries to reach, whatever Slurm makes of the node meanwhile. When srun gives up, it
    ends all agents that it has started. They come back without that node; what had begun meanwhile would be lost."""
    seen, since = gt.seen, gt.gang.phase_at
    if requeues.dead(gt):
        seen.dead_at = gt.now
    return seen.dead_at > since > seen.launched_at


def _never_enough(gt: GangTurn) -> bool:
    """Of the job's nodes too few are in service: Slurm, or their hardware, has taken the others."""
    gang, out = gt.gang, gt.turn.tallies.out
    nodes = gang.job_nodes
    if not nodes or len(nodes) - len(out) >= gang.spec.fewest:
        return False
    return sum(node not in out for node in nodes) < gang.spec.fewest


def _nobody_launches(gt: GangTurn) -> bool:
    """srun and the batch script have died with the batch host: no agent will come that is not on its way."""
    gang = gt.gang
    if gang.batch_host is None or not ends.batch_host_dead(gang):
        return False
    came_at = max((agent.attached_at for agent in gt.seen.agents.values()), default=0.0)
    on_their_way_until = max(came_at, gang.phase_at, gt.turn.sight.since) + SPARE_WAIT_S
    gt.turn.wake(on_their_way_until)
    return gt.now >= on_their_way_until


def _call_roll(gt: GangTurn) -> None:
    """Enough have attached: make sure that no rank of an earlier run is left, and have the store opened."""
    gang, here = gt.gang, [gt.gang.members[node] for node in gt.tally.here]
    store = placement.first_seats(here, gang.spec.nodes)[0]
    gt.turn.record(f.GenerationFenced(gang.id, gang.generation, "start", True, store, 0, gt.now))


def _missing(gang: Gang, here: Collection[str]) -> str:
    absent = [n for n in gang.job_nodes if n not in here]
    who = ", ".join(absent) if absent else f"{gang.spec.nodes - len(here)} nodes"
    return (
        f"{len(here)} of {gang.spec.nodes} nodes attached within {gang.spec.gather_timeout_s:.0f} s; missing: {who}. "
        f"{''.join(f'{member.out}. ' for member in gang.members.values() if member.out)}"
        "See the job's output file for srun's errors, and whether muster-agent is installed on these nodes"
    )
