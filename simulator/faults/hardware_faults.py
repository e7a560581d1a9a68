"""Faults of nodes: they crash, lose power, freeze, boot again, and report hardware signals."""

from __future__ import annotations

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.state_tables import Response
from muster.simulator.environment.network import COORDINATOR
from muster.simulator.faults import targets
from muster.simulator.faults.network_faults import cut
from muster.simulator.world.agent import Agent
from muster.simulator.world.world import World

_STEPS_BEFORE_FLIP = 4
"""Steps after which the gang has committed a version, as a rule."""
_SOON_S = 0.0005
"""Seconds, less than a message takes."""


def crash_node(world: World, gang: str) -> None:
    """A node crashes; its kernel closes all connections first. It may boot again."""
    take_down(world, targets.random_node(world, gang), closes=True)


def power_off_node(world: World, gang: str) -> None:
    """A node loses power and closes no connection. It may boot again."""
    take_down(world, targets.random_node(world, gang), closes=False)


def take_down(world: World, node: str, closes: bool) -> None:
    if world.machines[node].powered:
        world.note(f"FAULT: {node} {'crashes' if closes else 'loses power'}")
        world.power_off(node, closes)
        if world.rng.random() < 0.5:
            world.schedule.call_later(3.0 + 40.0 * world.rng.random(), _boot, world, node)


def lose_node_until_repaired(world: World, gang: str) -> None:
    """A node with ranks crashes, boots again, and is resumed by an operator. So the gang can get it back."""
    _lose_until_repaired(world, gang)


def repair_spare(world: World, gang: str) -> str:
    """A spare fails, and an operator resumes it soon. Returns its name; empty: there is none."""
    known = world.gang(gang)
    spare = next((seat.node for seat in known.roster.spares), "") if known is not None else ""
    if spare:
        _signal(world, spare, "unfit")
        world.schedule.call_later(1.0, _resume_once_drained, world, spare)
    return spare


def lose_node_until_badly_repaired(world: World, gang: str) -> None:
    """Likewise, but the node comes back broken in a way that no sensor sees: its ranks crash."""
    if node := _lose_until_repaired(world, gang):
        world.machines[node].crashes_ranks_after = world.rng.choice([0, 0, 3, 12])


def _lose_until_repaired(world: World, gang: str) -> str:
    """The node that is lost; empty: there is none that may crash."""
    known, job = world.gang(gang), world.jobs.running_job(gang)
    host = job.batch_host if job is not None else ""
    seats = [seat.node for seat in known.roster.seats if seat.node != host] if known is not None else []
    powered = [node for node in seats if world.machines[node].powered]
    if not powered:
        return ""
    node = powered[-1]
    world.note(f"FAULT: {node} crashes, and will be repaired")
    world.power_off(node, closes=True)
    world.schedule.call_later(5.0, _boot, world, node)
    world.schedule.call_later(6.0, _resume_once_drained, world, node)
    return node


def _resume_once_drained(world: World, node: str, attempts_left: int = 60) -> None:
    machine, in_slurm = world.machines[node], world.cluster.nodes()[node]
    if in_slurm.drained and machine.powered and not machine.frozen:
        world.note(f"an operator resumes {node}")
        world.cluster.resume(node)
    elif attempts_left:
        world.schedule.call_later(1.0, _resume_once_drained, world, node, attempts_left - 1)


def crash_batch_host(world: World, gang: str, attempts_left: int = 40) -> None:
    """The batch host crashes with srun as soon as its batch process was heard. It is back before Slurm notices."""
    job = world.jobs.running_job(gang)
    if job is not None and attempts_left and (job.id, job.restart_count) not in world.jobs.batch_heard_at:
        world.schedule.call_later(0.05, crash_batch_host, world, gang, attempts_left - 1)
    elif job is not None and world.machines[job.batch_host].powered:
        world.note(f"FAULT: {job.batch_host} crashes, and srun of {gang} with it")
        world.power_off(job.batch_host, closes=True)
        world.schedule.call_later(1.0 + 4.0 * world.rng.random(), _boot, world, job.batch_host)


def _boot(world: World, node: str) -> None:
    world.note(f"{node} boots")
    world.boot(node)


def slow_node(world: World, gang: str) -> None:
    """All ranks on a node compute longer than others, for ever or for some time."""
    node = targets.random_node(world, gang)
    world.note(f"FAULT: {node} is slow")
    world.step_times.slow_down(node)
    if world.rng.random() < 0.3:
        world.schedule.call_later(world.durations.fault_s(40.0), world.step_times.keep_pace, node)


def power_off_rack(world: World, gang: str) -> None:
    """Every node of a leaf loses power at once."""
    leaf = world.machines[targets.random_node(world, gang)].leaf
    for node, machine in world.machines.items():
        if machine.leaf == leaf:
            take_down(world, node, closes=False)


def power_off_with_holder(world: World, gang: str) -> None:
    """A node and the holder of its shards lose power at once."""
    gang_state, node = world.gang(gang), targets.random_node(world, gang)
    seat = next((seat for seat in gang_state.roster.seats if seat.node == node), None) if gang_state else None
    for name in dict.fromkeys((node, seat.holder or node) if seat else (node,)):
        take_down(world, name, closes=False)


def freeze_node(world: World, gang: str) -> None:
    """A node's processes stop and resume later. Its kernel answers."""
    node = targets.random_node(world, gang)
    if world.machines[node].powered and not world.machines[node].frozen:
        world.note(f"FAULT: {node} is frozen")
        world.set_frozen(node, True)
        world.schedule.call_later(world.durations.fault_s(40.0), unfreeze, world, node)


def unfreeze(world: World, node: str) -> None:
    if world.machines[node].powered and world.machines[node].frozen:
        world.note(f"{node} resumes")
        world.set_frozen(node, False)


def hardware_signal(world: World, gang: str) -> None:
    """A node reports a hardware signal."""
    node = targets.random_node(world, gang)
    action = world.rng.choice(["unfit", "unfit", "unfit_unless_explained", "degraded"])
    _signal(world, node, action)


def precursor(world: World, gang: str) -> None:
    """A node reports a precursor that the policy answers with a planned swap. No failure follows."""
    _signal(world, targets.random_node(world, gang), "degraded", Response.SWAP)


def passing_precursor(world: World, gang: str) -> None:
    """A node reports a precursor of a condition that ends soon."""
    node = targets.random_node(world, gang)
    response = world.rng.choice([Response.FLUSH, Response.SWAP, Response.SWAP])
    _signal(world, node, "degraded", response, lasting="gpu-throttle 64")
    world.schedule.call_later(world.durations.fault_s(10.0), _end_signal, world, node, "gpu-throttle 64")


def _end_signal(world: World, node: str, lasting: str) -> None:
    if world.daemons[node].alive:
        world.machines[node].ended_signals.add(lasting)
        world.daemons[node].report_signal(events.NodeSignalled(node, "over", f"{lasting}: over", "", signal=lasting))


def degraded_then_failure(world: World, gang: str) -> None:
    """A node reports a precursor, and the failure follows."""
    node = targets.random_node(world, gang)
    _signal(world, node, "degraded", world.rng.choice(list(Response)))
    failure = world.rng.choice([crash_node, power_off_node, freeze_node, freeze_node, None])
    delay = 1.0 + 4.0 * world.rng.random()
    if failure is None:
        world.schedule.call_later(delay, _signal, world, node, "unfit")
    elif failure is freeze_node:
        world.schedule.call_later(delay, freeze_for_long, world, node)
    else:
        world.schedule.call_later(delay, take_down, world, node, failure is crash_node)


def flip_bit(world: World, gang: str, attempts_left: int = 20) -> None:
    """A bit of a rank's parameters flips on one node while the gang trains, after the gradients were summed. Nothing
    reports it. Sometimes the commit leader fails just then."""
    training = world.newest_training(gang)
    if training is None or training.over or training.step < _STEPS_BEFORE_FLIP:
        if attempts_left:
            world.schedule.call_later(0.5, flip_bit, world, gang, attempts_left - 1)
        return
    world.flip_bit(world.rng.choice(list(training.ranks.values())))
    if world.rng.random() < 0.4 and 0 in training.ranks:  # rank 0 may not be started yet
        leader = training.ranks[0].agent.node
        world.schedule.call_later(0.6 * world.rng.random(), take_down, world, leader, True)


def flip_bit_in_only_version(world: World, gang: str) -> None:
    """A bit flips in the only version that is left in memory. A node is lost, so the next generation restores a version
    of which the commit leader holds the only copy of one shard. Then a bit flips, and the leader is lost before its
    decision on the next version arrives. Often a durable checkpoint was asked for."""
    training, known = world.newest_training(gang), world.gang(gang)
    if training is None or training.over or known is None or 0 not in training.ranks:  # rank 0 may not be started yet
        return
    leader = training.ranks[0].agent.node
    if node := next((seat.node for seat in known.roster.seats if seat.holder == leader), ""):
        world.coordinator.post_event(events.FlushRequested(gang, "uid 1000"))
        world.schedule.call_later(1.0, take_down, world, node, True)
        world.schedule.call_later(1.0, _flip_bit_once_restored, world, gang, training.generation, leader)


def _flip_bit_once_restored(world: World, gang: str, generation: int, leader: str, attempts_left: int = 200) -> None:
    training = world.newest_training(gang)
    if training is None or training.generation == generation or not training.began:
        if attempts_left:
            world.schedule.call_later(0.1, _flip_bit_once_restored, world, gang, generation, leader, attempts_left - 1)
    elif training.ranks[0].agent.node == leader:
        world.flip_bit(training.ranks[max(training.ranks)])
        world.schedule.call_later(_SOON_S, _lose_leader_once_replicas_disagree, world, training.ranks[0].agent)


def _lose_leader_once_replicas_disagree(world: World, leader: Agent, attempts_left: int = 5000) -> None:
    if leader.memory.disagreement is not None:
        take_down(world, leader.node, closes=True)
    elif attempts_left and leader.is_running():
        world.schedule.call_later(_SOON_S, _lose_leader_once_replicas_disagree, world, leader, attempts_left - 1)


def unfit_then_failure(world: World, gang: str) -> None:
    """A node reports a fatal signal and fails before its ranks can be told to end."""
    node = targets.random_node(world, gang)
    cut(world, [(COORDINATOR, node)], 10.0)
    _signal(world, node, "unfit")
    delay = 0.1 * world.rng.random()
    if world.rng.random() < 0.6:
        world.schedule.call_later(delay, freeze_for_long, world, node)
    else:
        world.schedule.call_later(delay, take_down, world, node, False)


def freeze_for_long(world: World, node: str) -> None:
    if world.machines[node].powered:
        world.set_frozen(node, True)
        world.schedule.call_later(15.0, unfreeze, world, node)


def _signal(world: World, node: str, action: str, response: Response = Response.RECORD, lasting: str = "") -> None:
    world.note(f"FAULT: {node} reports a hardware signal: {action}")
    if action in ("unfit", "unfit_unless_explained"):
        world.machines[node].has_hardware_fault = True
    world.machines[node].has_precursor |= response is Response.SWAP
    world.machines[node].ended_signals.discard(lasting)
    if world.daemons[node].alive:
        signal_event = events.NodeSignalled(node, action, f"Xid ({action})", "NVRM: Xid", response, lasting)
        world.daemons[node].report_signal(signal_event)


def correlated_signal(world: World, gang: str) -> None:
    """A node dies or freezes for long, and the hardware of a healthy peer reports a signal because of that."""
    gang_state = world.gang(gang)
    if gang_state is not None and len(gang_state.roster.seats) > 1:
        dead, peer = (seat.node for seat in world.rng.sample(gang_state.roster.seats, 2))
        world.note(f"FAULT: {dead} fails, and {peer} reports a correlated signal")
        world.correlated_signals[peer] = (gang, dead)
        if world.rng.random() < 0.3:
            world.power_off(dead, closes=False)
        elif world.machines[dead].powered:
            world.set_frozen(dead, True)
            world.schedule.call_later(80.0, unfreeze, world, dead)
        if world.daemons[peer].alive:
            signal_event = events.NodeSignalled(peer, "unfit_unless_explained", "Xid 74", "NVRM: Xid")
            world.schedule.call_later(0.1 + world.rng.random(), world.daemons[peer].report_signal, signal_event)
