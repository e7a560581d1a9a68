"""What happens to nodes: they crash, lose power, freeze, come back, and say that their hardware fails."""

from __future__ import annotations

from muster.daemon.coordinator.core.state import events
from muster.simulator.faults import targets
from muster.simulator.faults.network_faults import cut
from muster.simulator.world.network import COORDINATOR
from muster.simulator.world.world import World


def crash(world: World, gang: str) -> None:
    """A node goes down in order: its kernel closes all connections. It may come back."""
    go_down(world, targets.node(world, gang), closes=True)


def power_off(world: World, gang: str) -> None:
    """A node dies without a word. It may come back."""
    go_down(world, targets.node(world, gang), closes=False)


def go_down(world: World, node: str, closes: bool) -> None:
    if world.machines[node].kernel:
        world.note(f"FAULT: {node} {'crashes' if closes else 'loses power'}")
        world.power_off(node, closes)
        if world.chance.random() < 0.5:
            world.schedule.later(3.0 + 40.0 * world.chance.random(), _boot, world, node)


def launcher(world: World, gang: str, tries: int = 40) -> None:
    """The batch host goes down with srun as soon as its batch script is heard, and is back before Slurm has noticed."""
    job = world.jobs.running(gang)
    if job is not None and tries and world.jobs.batch_heard_at.get(job.id, -1.0) < (job.start_time or 0.0):
        world.schedule.later(0.05, launcher, world, gang, tries - 1)
    elif job is not None and world.machines[job.batch_host].kernel:
        world.note(f"FAULT: {job.batch_host} crashes, which starts the agents of {gang}")
        world.power_off(job.batch_host, closes=True)
        world.schedule.later(1.0 + 4.0 * world.chance.random(), _boot, world, job.batch_host)


def _boot(world: World, node: str) -> None:
    world.note(f"{node} boots")
    world.boot(node)


def rack(world: World, gang: str) -> None:
    """Every node of a leaf dies at once."""
    leaf = world.machines[targets.node(world, gang)].leaf
    for node, machine in world.machines.items():
        if machine.leaf == leaf:
            go_down(world, node, closes=False)


def buddies(world: World, gang: str) -> None:
    """A node and the one that keeps its copies die at once."""
    known, node = world.gang(gang), targets.node(world, gang)
    seat = next((seat for seat in known.seats if seat.node == node), None) if known else None
    for name in dict.fromkeys((node, seat.buddy or node) if seat else (node,)):
        go_down(world, name, closes=False)


def pause(world: World, gang: str) -> None:
    """A node's processes stop; its kernel answers. They go on after a while."""
    node = targets.node(world, gang)
    if world.machines[node].kernel and not world.machines[node].frozen:
        world.note(f"FAULT: {node} is paused")
        world.freeze(node, True)
        world.schedule.later(targets.a_while(world, 40.0), thaw, world, node)


def thaw(world: World, node: str) -> None:
    if world.machines[node].kernel and world.machines[node].frozen:
        world.note(f"{node} goes on")
        world.freeze(node, False)


def signal(world: World, gang: str) -> None:
    """A node's hardware says something."""
    node = targets.node(world, gang)
    judgement = world.chance.choice(["unfit", "unfit", "echo", "degraded"])
    _signal(world, node, judgement)


def degraded_then_worse(world: World, gang: str) -> None:
    """A precursor, and what it announced."""
    node = targets.node(world, gang)
    _signal(world, node, "degraded")
    worse = world.chance.choice([crash, power_off, pause, pause, None])
    delay = 1.0 + 4.0 * world.chance.random()
    if worse is None:
        world.schedule.later(delay, _signal, world, node, "unfit")
    elif worse is pause:
        world.schedule.later(delay, freeze_for_long, world, node)
    else:
        world.schedule.later(delay, go_down, world, node, worse is crash)


def unfit_then_worse(world: World, gang: str) -> None:
    """A fatal signal, and the node's end before its ranks could be told to go."""
    node = targets.node(world, gang)
    cut(world, [(COORDINATOR, node)], 10.0)
    _signal(world, node, "unfit")
    delay = 0.1 * world.chance.random()
    if world.chance.random() < 0.6:
        world.schedule.later(delay, freeze_for_long, world, node)
    else:
        world.schedule.later(delay, go_down, world, node, False)


def freeze_for_long(world: World, node: str) -> None:
    if world.machines[node].kernel:
        world.freeze(node, True)
        world.schedule.later(15.0, thaw, world, node)


def _signal(world: World, node: str, judgement: str) -> None:
    world.note(f"FAULT: the hardware of {node} says: {judgement}")
    if judgement in ("unfit", "echo"):
        world.machines[node].faulty = True
    if world.daemons[node].alive:
        world.daemons[node].signal(events.NodeSignalled(node, judgement, f"Xid ({judgement})", "NVRM: Xid"))


def echo(world: World, gang: str) -> None:
    """A node dies without a word, or hangs, for long, and the hardware of a peer tells of it, which has no fault."""
    known = world.gang(gang)
    if known is not None and len(known.seats) > 1:
        dead, peer = (seat.node for seat in world.chance.sample(known.seats, 2))
        world.note(f"FAULT: {peer} echoes the loss of {dead}")
        world.echoes[peer] = (gang, dead)
        if world.chance.random() < 0.3:
            world.power_off(dead, closes=False)
        elif world.machines[dead].kernel:
            world.freeze(dead, True)
            world.schedule.later(80.0, thaw, world, dead)
        if world.daemons[peer].alive:
            told = events.NodeSignalled(peer, "echo", "Xid 74", "NVRM: Xid")
            world.schedule.later(0.1 + world.chance.random(), world.daemons[peer].signal, told)
