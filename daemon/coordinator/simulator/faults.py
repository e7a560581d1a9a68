"""What can go wrong, each as a verb on the world. Whatever can be mended is mended by the verb itself after a while.

`FAULTS` names them with their weights; `strike` chooses one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from muster.daemon.coordinator.core import events as e
from muster.daemon.coordinator.core.states import Phase
from muster.daemon.coordinator.simulator.agent import Agent
from muster.daemon.coordinator.simulator.network import COORDINATOR
from muster.daemon.coordinator.simulator.world import World

Fault = Callable[[World, str], None]
"""Strikes the world, with a gang as its aim; nothing happens where there is nothing to strike."""


def members(world: World, gang: str) -> list[str]:
    """Nodes on which the gang has an agent that lives."""
    return [node for (id, node), agent in world.agents.items() if id == gang and agent.alive]


def _one(world: World, gang: str) -> str:
    """A node of the gang; more often one that carries ranks."""
    nodes = members(world, gang)
    if not nodes:
        return world.chance.choice(list(world.machines))
    carriers = [n for n in nodes if any(r.alive for r in world.agents[gang, n].ranks.values())]
    return world.chance.choice(carriers if carriers and world.chance.random() < 0.75 else nodes)


def _a_while(world: World, longest: float) -> float:
    """Mostly short, sometimes long; seconds."""
    return longest * world.chance.random() ** 3 + 0.05


def _agent(world: World, gang: str) -> Agent | None:
    node = _one(world, gang)
    agent = world.agents.get((gang, node))
    return agent if agent is not None and agent.alive else None


# -- nodes --


def crash(world: World, gang: str) -> None:
    """A node goes down in order: its kernel closes all connections. It may come back."""
    _go_down(world, _one(world, gang), closes=True)


def power_off(world: World, gang: str) -> None:
    """A node dies without a word. It may come back."""
    _go_down(world, _one(world, gang), closes=False)


def _go_down(world: World, node: str, closes: bool) -> None:
    if world.machines[node].kernel:
        world.note(f"FAULT: {node} {'crashes' if closes else 'loses power'}")
        world.power_off(node, closes)
        if world.chance.random() < 0.5:
            world.schedule.later(3.0 + 40.0 * world.chance.random(), _boot, world, node)


def _boot(world: World, node: str) -> None:
    world.note(f"{node} boots")
    world.boot(node)


def rack(world: World, gang: str) -> None:
    """Every node of a leaf dies at once."""
    leaf = world.machines[_one(world, gang)].leaf
    for node, machine in world.machines.items():
        if machine.leaf == leaf:
            _go_down(world, node, closes=False)


def pause(world: World, gang: str) -> None:
    """A node's processes stop; its kernel answers. They go on after a while."""
    node = _one(world, gang)
    if world.machines[node].kernel and not world.machines[node].frozen:
        world.note(f"FAULT: {node} is paused")
        world.freeze(node, True)
        world.schedule.later(_a_while(world, 40.0), _thaw, world, node)


def _thaw(world: World, node: str) -> None:
    if world.machines[node].kernel and world.machines[node].frozen:
        world.note(f"{node} goes on")
        world.freeze(node, False)


# -- processes --


def stop_agent(world: World, gang: str, seconds: float | None = None) -> None:
    """An agent alone stops, its ranks don't."""
    agent = _agent(world, gang)
    if agent is not None and not agent.stopped:
        world.note(f"FAULT: the agent on {agent.node} is stopped")
        world.stop(agent, True)
        world.schedule.later(seconds or _a_while(world, 25.0), world.stop, agent, False)


def stop_daemon(world: World, gang: str) -> None:
    """A node's daemon alone stops."""
    daemon = world.daemons[_one(world, gang)]
    if daemon.alive and not daemon.stopped:
        world.note(f"FAULT: the daemon on {daemon.machine.name} is stopped")
        world.stop(daemon, True)
        world.schedule.later(_a_while(world, 30.0), world.stop, daemon, False)


def stop_services(world: World, gang: str) -> None:
    """Agent and daemon of a node stop, its ranks don't."""
    agent = _agent(world, gang)
    if agent is not None and not agent.stopped and not world.daemons[agent.node].stopped:
        world.note(f"FAULT: agent and daemon on {agent.node} are stopped")
        seconds = 1.0 + 20.0 * world.chance.random()
        for process in (agent, world.daemons[agent.node]):
            world.stop(process, True)
            world.schedule.later(seconds, world.stop, process, False)


def kill_agent(world: World, gang: str) -> None:
    """An agent's process ends, and its ranks with it."""
    agent = _agent(world, gang)
    if agent is not None:
        world.note(f"FAULT: the agent on {agent.node} is killed")
        world.end_agent(agent)


def kill_daemon(world: World, gang: str) -> None:
    """A node's daemon ends; it is started anew."""
    node = _one(world, gang)
    if world.daemons[node].awake():
        world.note(f"FAULT: the daemon on {node} is killed")
        world.end_daemon(node)


def kill_rank(world: World, gang: str) -> None:
    """One rank exits."""
    agent = _agent(world, gang)
    able = [rank for rank in agent.ranks.values() if rank.able] if agent else []
    if agent is not None and able:
        rank = world.chance.choice(able)
        world.note(f"FAULT: rank {rank.rank} on {agent.node} exits")
        agent.rank_ends(rank, world.chance.choice([1, -9, -11]), "RuntimeError: CUDA error")


def sick_script(world: World, gang: str) -> None:
    """The script fails again and again for a while: in every generation a rank exits."""
    world.note(f"FAULT: the script of {gang} fails from now on")
    _fail_again(world, gang, world.schedule.now + 25.0)


def _fail_again(world: World, gang: str, until: float) -> None:
    training = world.newest_training(gang)
    if training is not None and not training.over:
        for rank in list(training.ranks.values())[:1]:
            if rank.able:
                rank.agent.rank_ends(rank, 1, "ValueError: loss is nan")
    if world.schedule.now < until:
        world.schedule.later(0.3, _fail_again, world, gang, until)


def stuck_rank(world: World, gang: str) -> None:
    """For a while, ranks on a node can't be killed."""
    node = _one(world, gang)
    world.note(f"FAULT: ranks on {node} can't be killed for a while")
    world.machines[node].stuck_until = world.schedule.now + 4.0 + 26.0 * world.chance.random()


def agent_error(world: World, gang: str) -> None:
    """An agent meets an error that no order mends."""
    agent = _agent(world, gang)
    if agent is not None:
        world.note(f"FAULT: the agent on {agent.node} has a full disk")
        agent.failure = "no space left on device"
        agent.changed()


# -- hardware signals --


def signal(world: World, gang: str) -> None:
    """A node's hardware says something."""
    node = _one(world, gang)
    judgement = world.chance.choice(["unfit", "unfit", "echo", "degraded"])
    _signal(world, node, judgement)


def degraded_then_worse(world: World, gang: str) -> None:
    """A precursor, and what it announced."""
    node = _one(world, gang)
    _signal(world, node, "degraded")
    worse = world.chance.choice([crash, power_off, pause, None])
    delay = 1.0 + 4.0 * world.chance.random()
    if worse is None:
        world.schedule.later(delay, _signal, world, node, "unfit")
    elif worse is pause:
        world.schedule.later(delay, _freeze_for_long, world, node)
    else:
        world.schedule.later(delay, _go_down, world, node, worse is crash)


def unfit_then_worse(world: World, gang: str) -> None:
    """A fatal signal, and the node's end before its ranks could be told to go."""
    node = _one(world, gang)
    _cut(world, [(COORDINATOR, node)], 10.0)
    _signal(world, node, "unfit")
    delay = 0.1 * world.chance.random()
    if world.chance.random() < 0.5:
        world.schedule.later(delay, _freeze_for_long, world, node)
    else:
        world.schedule.later(delay, _go_down, world, node, False)


def _freeze_for_long(world: World, node: str) -> None:
    if world.machines[node].kernel:
        world.freeze(node, True)
        world.schedule.later(15.0, _thaw, world, node)


def _signal(world: World, node: str, judgement: str) -> None:
    world.note(f"FAULT: the hardware of {node} says: {judgement}")
    if judgement in ("unfit", "echo"):
        world.machines[node].faulty = True
    if world.daemons[node].alive:
        world.daemons[node].signal(e.NodeSignalled(node, judgement, f"Xid ({judgement})", "NVRM: Xid"))


# -- wires --


def _cut(world: World, pairs: list[tuple[str, str]], seconds: float) -> None:
    words = ", ".join(f"{a} to {b}" for a, b in pairs)
    world.note(f"FAULT: cut for {seconds:.1f} s: {words}")
    for src, dst in pairs:
        world.network.cut(src, dst)
    world.changed()
    world.schedule.later(seconds, _mend, world, pairs)


def _mend(world: World, pairs: list[tuple[str, str]]) -> None:
    world.note(f"mended: {', '.join(f'{a} to {b}' for a, b in pairs)}")
    for src, dst in pairs:
        world.network.mend(src, dst)
    world.changed()


def _cut_for_good(world: World, pairs: list[tuple[str, str]], longest: float) -> None:
    """Cut wires, now and then for ever."""
    if world.chance.random() < 0.1:
        world.lasting.update(pairs)
        _cut(world, pairs, 1e6)
    else:
        _cut(world, pairs, _a_while(world, longest))


def _directions(world: World, a: str, b: str) -> list[tuple[str, str]]:
    """Both, or one."""
    return world.chance.choice([[(a, b), (b, a)], [(a, b), (b, a)], [(a, b)], [(b, a)]])


def cut_link(world: World, gang: str) -> None:
    """Two nodes don't reach each other."""
    node = _one(world, gang)
    others = [name for name in (*world.machines, COORDINATOR) if name != node]
    _cut(world, _directions(world, node, world.chance.choice(others)), _a_while(world, 20.0))


def cut_from_coordinator(world: World, gang: str) -> None:
    """One node and the coordinator don't reach each other."""
    _cut_for_good(world, _directions(world, _one(world, gang), COORDINATOR), 30.0)


def isolate(world: World, gang: str) -> None:
    """One node reaches nobody, or is reached by nobody, or both."""
    node = _one(world, gang)
    hosts = [name for name in (*world.machines, COORDINATOR) if name != node]
    out, into = [(node, host) for host in hosts], [(host, node) for host in hosts]
    _cut_for_good(world, world.chance.choice([out + into, out + into, out, into]), 30.0)


def fabric(world: World, gang: str) -> None:
    """One node reaches nobody, and the others' ranks die of it at once: their transfers have failed."""
    training = world.newest_training(gang)
    if training is not None and not training.over:
        node = world.chance.choice([rank.agent.node for rank in training.ranks.values()])
        hosts = [name for name in (*world.machines, COORDINATOR) if name != node]
        pairs = [pair for host in hosts for pair in ((node, host), (host, node))]
        _cut(world, pairs, 3.0 + 20.0 * world.chance.random())
        training.feel_reset(node, 0.8)


def isolate_coordinator(world: World, gang: str) -> None:
    """The coordinator's own link is cut."""
    out = [(COORDINATOR, node) for node in world.machines]
    into = [(node, COORDINATOR) for node in world.machines]
    _cut(world, world.chance.choice([out + into, out + into, out, into]), 1.0 + 39.0 * world.chance.random())


def split(world: World, gang: str) -> None:
    """The nodes fall into two parts; the coordinator is with one of them."""
    nodes = list(world.machines)
    world.chance.shuffle(nodes)
    half = nodes[: world.chance.randint(1, max(1, len(nodes) - 1))]
    rest = [*(n for n in nodes if n not in half), COORDINATOR]
    _cut(world, [pair for a in half for b in rest for pair in ((a, b), (b, a))], _a_while(world, 25.0))


def flap(world: World, gang: str) -> None:
    """A node's link goes down and up again and again."""
    node = _one(world, gang)
    hosts = [name for name in (*world.machines, COORDINATOR) if name != node]
    pairs = [pair for host in hosts for pair in ((node, host), (host, node))]
    at = 0.0
    for _ in range(world.chance.randint(2, 4)):
        down = 0.2 + 3.0 * world.chance.random()
        world.schedule.later(at, _cut, world, pairs, down)
        at += down + 0.3 + 3.0 * world.chance.random()


# -- coordinator, Slurm, users --


def crash_coordinator(world: World, gang: str) -> None:
    """The coordinator dies at one of the next points at which it writes or acts, or now."""
    world.restart_s = 0.1 + _a_while(world, 30.0)
    if world.chance.random() < 0.25 and world.coordinator.alive:
        world.coordinator_dies("by itself")
    else:
        world.crash_after = world.chance.randint(1, 12)


def stall_coordinator(world: World, gang: str) -> None:
    """The coordinator stands still."""
    seconds = _a_while(world, 8.0)
    world.note(f"FAULT: the coordinator stands still for {seconds:.1f} s")
    world.stall_coordinator(seconds)


def slurm_mute(world: World, gang: str) -> None:
    """slurmctld does not answer."""
    if not world.slurm.silent_because:
        world.note("FAULT: Slurm is mute")
        world.slurm.silent_because = "slurmctld is down"
        world.schedule.later(_a_while(world, 60.0), _slurm_answers, world)


def _slurm_answers(world: World) -> None:
    world.note("Slurm answers")
    world.slurm.silent_because = ""


def slurm_odd(world: World, gang: str) -> None:
    """Slurm answers late and wrongly."""
    world.note("FAULT: Slurm is late and wrong")
    world.slurm.wrong, world.slurm.late_s = 0.6, 10.0
    world.schedule.later(40.0, _slurm_sane, world)


def _slurm_sane(world: World) -> None:
    world.note("Slurm is itself again")
    world.slurm.wrong, world.slurm.late_s = 0.0, 0.05


def slurm_requeues(world: World, gang: str) -> None:
    """An operator requeues the job."""
    job = world.jobs.running(gang)
    if job is not None and job.requeue:
        world.note(f"FAULT: an operator requeues job {job.id}")
        world.cluster.requeue(job.id, (), None)


def requeue_flag_off(world: World, gang: str) -> None:
    """Somebody forbids that the job be requeued."""
    job = world.jobs.running(gang)
    if job is not None:
        world.note(f"FAULT: job {job.id} may not be requeued any more")
        world.cluster.update("take the requeue flag off", job.id, requeue=False)


def batch_script(world: World, gang: str) -> None:
    """The batch script ends by itself, with an error."""
    job = world.jobs.running(gang)
    if job is not None and world.cluster.finish(job.id, 1):
        world.note(f"FAULT: the batch script of job {job.id} has ended with 1")


def cancel(world: World, gang: str) -> None:
    """muster cancel."""
    if world.coordinator.awake() and world.gang(gang):
        world.note(f"FAULT: {gang} is cancelled")
        world.coordinator.post(e.CancelAsked(gang, "uid 1000"))


def scancel(world: World, gang: str) -> None:
    """scancel."""
    world.note(f"FAULT: scancel of {gang}")
    world.cluster.cancel(world.jobs.ids[gang])


def ask_flush(world: World, gang: str) -> None:
    """muster flush."""
    if world.coordinator.awake() and world.gang(gang):
        world.note(f"FAULT: a flush of {gang} is asked for")
        world.coordinator.post(e.FlushAsked(gang, "uid 1000"))


def storage(world: World, gang: str) -> None:
    """Durable storage is full, or hangs."""
    world.note("FAULT: durable storage fails")
    until = world.schedule.now + 30.0
    if world.chance.random() < 0.5:
        world.flushes.broken_until = until
    else:
        world.flushes.mute_until = until


def slander(world: World, gang: str) -> None:
    """An agent accuses a node for no reason."""
    nodes = members(world, gang)
    if len(nodes) > 1 and world.coordinator.awake():
        witness, node = world.chance.sample(nodes, 2)
        silence = world.chance.choice(list(e.Silence))
        world.note(f"FAULT: {witness} accuses {node} for no reason ({silence})")
        world.coordinator.post(e.NeighbourAccused(gang, witness, node, silence))


FAULTS: dict[Fault, float] = {
    crash: 4, power_off: 4, rack: 1, pause: 3, stop_agent: 2, stop_daemon: 1, stop_services: 2, kill_agent: 2,
    kill_daemon: 1,
    kill_rank: 3, sick_script: 2, stuck_rank: 1, agent_error: 0.8, signal: 4, degraded_then_worse: 4,
    cut_link: 2, cut_from_coordinator: 4, isolate: 3, fabric: 4, isolate_coordinator: 3, split: 1.5, flap: 1.5,
    crash_coordinator: 5, stall_coordinator: 1.5, slurm_mute: 1, slurm_odd: 1, slurm_requeues: 0.7, cancel: 0.5,
    scancel: 0.5, batch_script: 0.3, requeue_flag_off: 0.7, unfit_then_worse: 4, ask_flush: 1, storage: 0.7,
    slander: 1,
}  # fmt: skip
ENDERS: tuple[Fault, ...] = (cancel, scancel, batch_script, slurm_requeues)
DISTURBERS: tuple[Fault, ...] = (
    crash_coordinator,
    crash_coordinator,
    crash_coordinator,
    kill_rank,
    power_off,
    pause,
    signal,
    isolate,
)
EARLY = (Phase.SUBMITTED, Phase.GATHERING, Phase.PREFLIGHT, Phase.STARTING, Phase.RUNNING, Phase.RECOVERING)
LATE = (Phase.DRAINING, Phase.REQUEUED)
LINGERING = (Phase.PREFLIGHT, Phase.STARTING, Phase.RECOVERING, Phase.DRAINING)
"""What would be over in a moment: an agent is stopped first, so that it lasts."""


def strike(world: World, gang: str) -> None:
    """One fault, chosen by weight; often another one comes with it."""
    for fault in world.chance.choices(list(FAULTS), list(FAULTS.values()), k=world.chance.choice([1, 1, 2])):
        _count(world, fault, gang)


def ambush(world: World, phases: Sequence[Phase]) -> None:
    """Lie in wait for a gang to enter one of `phases`, and strike then."""
    phase = world.chance.choice(phases)
    fault = world.chance.choice(ENDERS if world.chance.random() < 0.6 else DISTURBERS)
    lingers = phase in LINGERING and fault in ENDERS and world.chance.random() < 0.7

    def spring(gang: str) -> None:
        if lingers:
            stop_agent(world, gang, 3.0 + 3.0 * world.chance.random())
        _count(world, fault, gang)

    world.ambushes.append((phase, spring))


def _count(world: World, fault: Fault, gang: str) -> None:
    if fault is not crash_coordinator:  # counted when it does die
        world.tally.count("fault", fault.__name__.replace("_", " "))
    fault(world, gang)
