"""Faults of the coordinator, Slurm and storage, and what users and operators do."""

from __future__ import annotations

from collections.abc import Sequence

from muster.daemon.coordinator.core.state import events
from muster.simulator.faults import targets
from muster.simulator.world.world import World

_OTHER_JOB_ID = 10_000
"""A job id that no job of a seed has."""


def crash_coordinator(world: World, gang: str) -> None:
    """The coordinator crashes at one of the next points at which it writes or acts, or now."""
    world.coordinator_restart_s = 0.1 + world.durations.fault_s(30.0)
    if world.rng.random() < 0.25 and world.coordinator.alive:
        world.crash_coordinator("by itself")
    else:
        world.crash_countdown = world.rng.randint(1, 12)


def stall_coordinator(world: World, gang: str) -> None:
    """The coordinator stands still."""
    seconds = world.durations.fault_s(8.0)
    world.note(f"FAULT: the coordinator stands still for {seconds:.1f} s")
    world.stall_coordinator(seconds)


def slurm_unresponsive(world: World, gang: str) -> None:
    """slurmctld does not answer."""
    if not world.slurm.unavailable_reason:
        world.note("FAULT: Slurm does not answer")
        world.slurm.unavailable_reason = "slurmctld is down"
        world.schedule.call_later(world.durations.fault_s(60.0), _slurm_responsive, world)


def _slurm_responsive(world: World) -> None:
    world.note("Slurm answers again")
    world.slurm.unavailable_reason = ""


def slurm_unreliable(world: World, gang: str) -> None:
    """Slurm answers late, and its commands fail."""
    world.note("FAULT: Slurm answers late and fails")
    world.slurm.error_rate, world.slurm.max_delay_s = 0.6, 10.0
    world.schedule.call_later(40.0, _slurm_reliable, world)


def _slurm_reliable(world: World) -> None:
    world.note("Slurm is reliable again")
    world.slurm.error_rate, world.slurm.max_delay_s = 0.0, 0.05


def fail_launches(world: World, nodes: Sequence[str], for_s: float) -> None:
    """The Prolog fails on these nodes for some time. A launch there drains its node, and Slurm holds the job."""
    world.note(f"FAULT: the Prolog fails on {' '.join(nodes)} for {for_s:.1f} s")
    world.coverage.count("fault", "fail launches")
    world.cluster.prolog_fails_on.update(nodes)
    world.schedule.call_later(for_s, world.cluster.prolog_fails_on.clear)


def requeue_job(world: World, gang: str) -> None:
    """An operator requeues the job."""
    job = world.jobs.running_job(gang)
    if job is not None and job.requeue:
        world.note(f"FAULT: an operator requeues job {job.id}")
        world.cluster.requeue(job.id, (), None)


def give_node_back(world: World, gang: str) -> None:
    """The job's owner gives a node back, and sometimes keeps the agent there and lets it withhold its fence."""
    job = world.jobs.running_job(gang)
    if job is None or not world.machines[job.batch_host].powered:
        return  # Slurm does not shrink a job without its batch host
    nodes = [node for node in targets.nodes_with_agent(world, gang) if node in job.nodes and node != job.batch_host]
    if nodes and job.batch_host in job.nodes:
        node = world.rng.choice(nodes)
        agent = world.agents[gang, node]
        agent.is_rogue = world.rng.random() < 0.5
        world.note(f"FAULT: job {job.id} gives {node} back{', and its agent stays' if agent.is_rogue else ''}")
        world.cluster.remove_node(job.id, node)


def preempt_job(world: World, gang: str) -> None:
    """Slurm preempts the job, with a grace time."""
    job = world.jobs.running_job(gang)
    if job is not None:
        grace_s = world.rng.choice([2.0, 15.0, 40.0, 150.0]) * (0.5 + world.rng.random())
        world.note(f"FAULT: job {job.id} is preempted, with {grace_s:.1f} s of grace")
        world.jobs.preempt(job, grace_s)


def start_other_job(world: World, gang: str) -> None:
    """A foreign job runs on a node where the gang's agent has ended."""
    gang_agents = {node: agent for (id, node), agent in world.agents.items() if id == gang}
    nodes_without_agent = [
        node for node, agent in gang_agents.items() if not agent.alive and world.machines[node].powered
    ]
    if nodes_without_agent:
        node = world.rng.choice(nodes_without_agent)
        world.note(f"FAULT: another job has run on {node}")
        world.kept_memory.job_starts(node, _OTHER_JOB_ID)


def clear_requeue_flag(world: World, gang: str) -> None:
    """Someone forbids that the job is requeued."""
    job = world.jobs.running_job(gang)
    if job is not None:
        world.note(f"FAULT: job {job.id} may no longer be requeued")
        world.cluster.update("take the requeue flag off", job.id, requeue=False)


def fail_batch_script(world: World, gang: str) -> None:
    """The batch script ends by itself with an error."""
    job = world.jobs.running_job(gang)
    if job is not None and world.cluster.end_batch_script(job.id, 1):
        world.note(f"FAULT: the batch script of job {job.id} has ended with 1")


def cancel_gang(world: World, gang: str) -> None:
    """A user runs `muster cancel`."""
    if world.coordinator.is_running() and world.gang(gang):
        world.note(f"FAULT: {gang} is cancelled")
        world.coordinator.post_event(events.CancelRequested(gang, "uid 1000"))


def scancel_job(world: World, gang: str) -> None:
    """A user runs `scancel`."""
    world.note(f"FAULT: scancel of {gang}")
    world.cluster.cancel(world.jobs.job_ids[gang])


def request_flush(world: World, gang: str) -> None:
    """A user calls Flush of the API."""
    if world.coordinator.is_running() and world.gang(gang):
        world.note(f"FAULT: a flush of {gang} is requested")
        world.coordinator.post_event(events.FlushRequested(gang, "uid 1000"))


def request_swap(world: World, gang: str) -> None:
    """A user runs `muster swap`. Often nothing is possible, and the request is dropped."""
    if world.coordinator.is_running() and world.gang(gang):
        node = targets.random_node(world, gang)
        world.note(f"FAULT: a user requests a swap of {node}")
        world.requested_swaps.add((gang, node))
        world.coordinator.post_event(events.SwapRequested(gang, node, "uid 1000", ""))


def request_drain(world: World, gang: str) -> None:
    """An operator runs `muster drain`."""
    if world.coordinator.is_running() and world.gang(gang):
        node = targets.random_node(world, gang)
        world.note(f"FAULT: an operator drains {node}")
        world.requested_drains.add(node)
        world.coordinator.post_event(events.DrainRequested(node, "root", "its fan is loud"))


def fail_durable_storage(world: World, gang: str) -> None:
    """Durable storage is full, or it hangs."""
    world.note("FAULT: durable storage fails")
    until = world.schedule.now + 30.0
    if world.rng.random() < 0.7:
        world.durable_storage.fails_until = until
    else:
        world.durable_storage.hangs_until = until


def false_accusation(world: World, gang: str) -> None:
    """An agent accuses a healthy node."""
    nodes = targets.nodes_with_agent(world, gang)
    if len(nodes) > 1 and world.coordinator.is_running():
        witness, node = world.rng.sample(nodes, 2)
        silence = world.rng.choice(list(events.Silence))
        world.note(f"FAULT: {witness} accuses {node} without a reason ({silence})")
        world.coordinator.post_event(events.PeerAccused(gang, witness, node, silence))
