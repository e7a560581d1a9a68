"""Faults of processes: agents, node daemons and ranks stop, end, hang, or can't be killed."""

from __future__ import annotations

from muster.simulator.faults import targets
from muster.simulator.world.agent import Rank
from muster.simulator.world.world import World


def stop_agent_of_seat(world: World, gang: str, seconds: float) -> None:
    """Stop the agent of a node that has a seat, so that the gang's present phase lasts."""
    gang_state = world.gang(gang)
    nodes = [seat.node for seat in gang_state.roster.seats] if gang_state else []
    agents = [agent for node in nodes if (agent := world.agents.get((gang, node))) and agent.is_running()]
    if agents:
        agent = world.rng.choice(agents)
        world.note(f"the agent on {agent.node} is stopped, so that the phase lasts")
        world.set_stopped(agent, True)
        world.schedule.call_later(seconds, world.set_stopped, agent, False)


def stop_agent(world: World, gang: str) -> None:
    """An agent stops. Its ranks run on."""
    agent = targets.random_agent(world, gang)
    if agent is not None and not agent.stopped:
        world.note(f"FAULT: the agent on {agent.node} is stopped")
        world.set_stopped(agent, True)
        world.schedule.call_later(world.durations.fault_s(25.0), world.set_stopped, agent, False)


def stop_node_daemon(world: World, gang: str) -> None:
    """A node daemon stops."""
    daemon = world.daemons[targets.random_node(world, gang)]
    if daemon.alive and not daemon.stopped:
        world.note(f"FAULT: the node daemon on {daemon.machine.name} is stopped")
        world.set_stopped(daemon, True)
        world.schedule.call_later(world.durations.fault_s(30.0), world.set_stopped, daemon, False)


def stop_agent_and_daemon(world: World, gang: str) -> None:
    """The agent and the node daemon of a node stop. The ranks run on."""
    agent = targets.random_agent(world, gang)
    if agent is not None and not agent.stopped and not world.daemons[agent.node].stopped:
        world.note(f"FAULT: agent and node daemon on {agent.node} are stopped")
        seconds = 6.0 + 20.0 * world.rng.random()
        for process in (agent, world.daemons[agent.node]):
            world.set_stopped(process, True)
            world.schedule.call_later(seconds, world.set_stopped, process, False)


def kill_agent(world: World, gang: str) -> None:
    """An agent's process ends, and its ranks with it."""
    agent = targets.random_agent(world, gang)
    if agent is not None:
        world.note(f"FAULT: the agent on {agent.node} is killed")
        world.end_agent(agent)


def slow_rank(world: World, gang: str) -> None:
    """One rank computes longer than the others, on whichever node it runs: its script gives it more to do."""
    agent = targets.random_agent(world, gang)
    if agent is not None and agent.ranks:
        rank = world.rng.choice(list(agent.ranks))
        world.note(f"FAULT: rank {rank} of {gang} is slow")
        world.step_times.slow_down((gang, rank))


def kill_node_daemon(world: World, gang: str) -> None:
    """A node daemon ends and is started again."""
    node = targets.random_node(world, gang)
    if world.daemons[node].is_running():
        world.note(f"FAULT: the node daemon on {node} is killed")
        world.end_daemon(node)


def kill_rank(world: World, gang: str) -> None:
    """One rank crashes."""
    agent = targets.random_agent(world, gang)
    active_ranks = [rank for rank in agent.ranks.values() if rank.is_active] if agent else []
    if agent is not None and active_ranks:
        rank = world.rng.choice(active_ranks)
        world.note(f"FAULT: rank {rank.rank} on {agent.node} crashes")
        _crash_rank(world, rank, world.rng.choice([1, -9, -11]), "RuntimeError: CUDA error")


def _crash_rank(world: World, rank: Rank, exit_code: int, stderr: str, first: str = "") -> None:
    """A rank crashes, and its kernel resets the connections to its peers.

    Some peers crash because of that, and their agents may report first. Ranks on the node `first` always do.
    """
    training = world.newest_training(rank.agent.identity.gang)
    if training is not None and training.generation == rank.generation:
        training.reset_connections(rank.agent.node, 0.4, within_s=0.1, first=first)
    rank.agent.crash_rank(rank, exit_code, stderr, 0.1 * world.rng.random() + (0.1 if first else 0.0))


def crash_ranks_on_node(world: World, gang: str) -> None:
    """Ranks on one node crash in two consecutive generations, without a new step in between."""
    gang_state = world.gang(gang)
    seats = [seat.node for seat in gang_state.roster.seats] if gang_state else []
    node = world.rng.choice(seats) if seats else targets.random_node(world, gang)
    others = [other for other in seats if other != node]
    first = world.rng.choice(others) if others and world.rng.random() < 0.5 else ""
    world.note(f"FAULT: ranks on {node} crash" + (f", and {first} reports first" if first else ""))
    _crash_again_on_node(world, gang, (node, first), 0, 2, world.schedule.now + 40.0)


def _crash_again_on_node(
    world: World, gang: str, crash_nodes: tuple[str, str], generation: int, repeats_left: int, until: float
) -> None:
    node, first = crash_nodes
    agent = world.agents.get((gang, node))
    active_ranks = [r for r in agent.ranks.values() if r.is_active and r.generation > generation] if agent else []
    if agent is not None and active_ranks:
        _crash_rank(world, active_ranks[0], -11, "", first)
        generation, repeats_left = active_ranks[0].generation, repeats_left - 1
    if repeats_left and world.schedule.now < until:
        world.schedule.call_later(0.2, _crash_again_on_node, world, gang, crash_nodes, generation, repeats_left, until)


def crash_script_repeatedly(world: World, gang: str) -> None:
    """The script is broken for some time: in every generation a rank exits with an error."""
    world.note(f"FAULT: the script of {gang} crashes from now on")
    _crash_again(world, gang, world.schedule.now + 25.0)


def _crash_again(world: World, gang: str, until: float) -> None:
    training = world.newest_training(gang)
    if training is not None and not training.over:
        for rank in list(training.ranks.values())[:1]:
            if rank.is_active:
                rank.agent.rank_exited(rank, 1, "ValueError: loss is nan")
    if world.schedule.now < until:
        world.schedule.call_later(0.3, _crash_again, world, gang, until)


def hang_rank(world: World, gang: str) -> None:
    """A rank hangs; its process lives. If the core does not look for hangs, the rank resumes later."""
    training = world.newest_training(gang)
    if training is not None and training.began and not training.over:
        rank = world.rng.choice(list(training.ranks.values()))
        world.note(f"FAULT: rank {rank.rank} on {rank.agent.node} hangs")
        training.hang_rank(rank, behind=world.rng.random() < 0.5)
        _resume_undetected_hang(world, gang, rank)


def silence_rank(world: World, gang: str) -> None:
    """No Python thread of a rank runs for some time, which the script has declared or not."""
    training = world.newest_training(gang)
    if training is not None and training.began and not training.over:
        rank = world.rng.choice(list(training.ranks.values()))
        for_s = world.rng.choice([3.0, 6.0, 30.0, 200.0])
        world.note(f"FAULT: no Python runs in rank {rank.rank} on {rank.agent.node} for {for_s:g} s")
        if not training.in_declared_phase and world.rng.random() < 0.3:
            training.declare_phase(10.0 + 20.0 * world.rng.random())
        training.silence_rank(rank)
        world.schedule.call_later(for_s, training.end_silence, rank)


def _resume_undetected_hang(world: World, gang: str, rank: Rank) -> None:
    gang_state = world.gang(gang)
    if (
        world.limits.observe
        or gang_state is None
        or not gang_state.spec.hang_after_s
        or not gang_state.newest.stepped_generation
    ):
        for other in rank.agent.ranks.values():
            world.schedule.call_later(30.0, _end_hang, world, gang, other)


def _end_hang(world: World, gang: str, rank: Rank) -> None:
    training = world.newest_training(gang)
    if training is not None and training.generation == rank.generation:
        training.end_hang(rank)


def hang_ranks_on_node(world: World, gang: str) -> None:
    """Ranks on one node hang, a step behind the others, in two consecutive generations without a step in between."""
    gang_state = world.gang(gang)
    if gang_state is not None and gang_state.roster.seats:
        node = world.rng.choice(gang_state.roster.seats).node
        world.note(f"FAULT: ranks on {node} hang")
        _hang_again_on_node(world, gang, node, 0, 2, world.schedule.now + 90.0)


def _hang_again_on_node(world: World, gang: str, node: str, generation: int, repeats_left: int, until: float) -> None:
    training = world.newest_training(gang)
    if training is not None and training.began and not training.over and training.generation > generation:
        ranks_there = [rank for rank in training.ranks.values() if rank.agent.node == node]
        if ranks_there:
            training.hang_rank(ranks_there[0], behind=True)
            _resume_undetected_hang(world, gang, ranks_there[0])
            generation, repeats_left = training.generation, repeats_left - 1
    if repeats_left and world.schedule.now < until:
        world.schedule.call_later(0.2, _hang_again_on_node, world, gang, node, generation, repeats_left, until)


def declared_phase(world: World, gang: str) -> None:
    """All ranks are in a declared phase that lasts longer than the hang timeout."""
    training = world.newest_training(gang)
    if training is not None and training.began and not training.over and not training.in_declared_phase:
        world.note(f"FAULT: the ranks of {gang} are in a declared phase")
        training.declare_phase(15.0 + 45.0 * world.rng.random())


def unkillable_ranks(world: World, gang: str) -> None:
    """For some time, ranks on a node can't be killed."""
    node = targets.random_node(world, gang)
    world.note(f"FAULT: ranks on {node} can't be killed for some time")
    world.machines[node].ranks_unkillable_until = world.schedule.now + 4.0 + 26.0 * world.rng.random()


def agent_error(world: World, gang: str) -> None:
    """One agent of the gang, or every one, meets an error that no order can repair."""
    agent = targets.random_agent(world, gang)
    if agent is None:
        return
    every_agent = world.rng.random() < 0.5
    world.note(f"FAULT: {'every agent' if every_agent else f'the agent on {agent.node}'} of {gang} has a full disk")
    for (id, node), other in sorted(world.agents.items()):
        if id == gang and (every_agent or node == agent.node) and other.alive:
            other.failure = "no space left on device"
            other.status_changed()


def stuck_shared_storage(world: World, gang: str) -> None:
    """Shared storage hangs: for some time no rank on any node can be killed. One rank crashes."""
    world.note("FAULT: shared storage hangs")
    until = world.schedule.now + 12.0 + 20.0 * world.rng.random()
    for machine in world.machines.values():
        machine.ranks_unkillable_until = max(machine.ranks_unkillable_until, until)
    kill_rank(world, gang)
