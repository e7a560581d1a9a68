"""What can go wrong: every fault with its weight, and those that lie in wait for a phase.

A fault is a verb on the world. Whatever can be mended is mended by the verb itself after a while.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.simulator.faults import hardware_faults as hardware
from muster.simulator.faults import network_faults as wire
from muster.simulator.faults import process_faults as process
from muster.simulator.faults import service_faults as service
from muster.simulator.world.world import World

Fault = Callable[[World, str], None]
"""Strikes the world, with a gang as its aim; nothing happens where there is nothing to strike."""

FAULTS: dict[Fault, float] = {
    hardware.crash: 4, hardware.power_off: 4, hardware.rack: 4, hardware.pause: 4, process.stop_agent: 2,
    process.stop_daemon: 1, process.stop_services: 7, process.kill_agent: 2, process.kill_daemon: 1,
    process.kill_rank: 5, process.sick_node: 17, process.sick_script: 3.2, process.stuck_rank: 1,
    process.hang_rank: 9.5, process.hanging_node: 7, process.declared_phase: 4,
    process.agent_error: 4, hardware.signal: 4, hardware.degraded_then_worse: 13, wire.cut_link: 2,
    wire.cut_from_coordinator: 7, wire.blind_spot: 3, wire.isolate: 7, wire.fabric: 4, wire.isolate_coordinator: 5,
    wire.split: 1.5, wire.flap: 1.5, service.crash_coordinator: 5, service.stall_coordinator: 2.5,
    service.slurm_mute: 1, service.slurm_odd: 1, service.slurm_requeues: 8.5, service.preempt: 4, service.cancel: 0.6,
    service.scancel: 0.5, service.batch_script: 0.9, service.requeue_flag_off: 0.7, hardware.unfit_then_worse: 13.5,
    hardware.buddies: 2, service.ask_flush: 1, service.storage: 1.4, service.slander: 1,
}  # fmt: skip
"""With the weight of each."""
ENDERS: tuple[Fault, ...] = (
    service.cancel, service.cancel, service.scancel, service.batch_script, service.batch_script, service.batch_script,
    service.slurm_requeues, service.slurm_requeues, service.slurm_requeues, service.slurm_requeues,
)  # fmt: skip
DISTURBERS: tuple[Fault, ...] = (
    service.crash_coordinator,
    service.crash_coordinator,
    service.crash_coordinator,
    process.kill_rank,
    hardware.power_off,
    hardware.pause,
    hardware.signal,
    wire.isolate,
    process.stop_services,
    service.storage,
    service.storage,
)
EARLY = (
    *[Phase.SUBMITTED] * 3, *[Phase.GATHERING] * 2, *[Phase.PREFLIGHT] * 6, *[Phase.STARTING] * 5,
    *[Phase.RUNNING] * 2, *[Phase.RECOVERING] * 2,
)  # fmt: skip
LATE = (Phase.DRAINING, Phase.REQUEUED)
LINGERING = (Phase.PREFLIGHT, Phase.STARTING, Phase.RECOVERING, Phase.DRAINING)
"""What would be over in a moment: an agent is stopped first, so that it lasts."""


def strike(world: World, gang: str) -> None:
    """One fault, chosen by weight; often another one comes with it."""
    for fault in world.chance.choices(list(FAULTS), list(FAULTS.values()), k=world.chance.choice([1, 2])):
        _count(world, fault, gang)


def ambush(world: World, phases: Sequence[Phase]) -> None:
    """Lie in wait for a gang to enter one of `phases`, and strike then."""
    phase = world.chance.choice(phases)
    fault = world.chance.choice(ENDERS if world.chance.random() < 0.6 else DISTURBERS)
    lingers = phase in LINGERING and fault in ENDERS

    def spring(gang: str) -> None:
        delay = max(0.0, 0.4 * world.chance.random() - 0.2)
        if lingers:
            process.stop_a_seat(world, gang, 3.0 + 3.0 * world.chance.random())
            delay = 0.0
        world.schedule.later(delay, _count, world, fault, gang)

    world.ambushes.append((phase, spring))


def soon(world: World, fault: Fault, after_s: float, phase: Phase = Phase.RUNNING) -> None:
    """So long after the first gang has come to this phase it is struck."""
    world.ambushes.append((phase, lambda gang: world.schedule.later(after_s, _count, world, fault, gang)))


def _count(world: World, fault: Fault, gang: str) -> None:
    if fault is not service.crash_coordinator:  # counted when it does die
        world.tally.count("fault", fault.__name__.replace("_", " "))
    fault(world, gang)


def ended_in_preflight(world: World, gang: str) -> None:
    """The job ends while its preflight lasts."""
    process.stop_a_seat(world, gang, 3.0 + 3.0 * world.chance.random())
    service.batch_script(world, gang)


def requeued_at_the_start(world: World, gang: str) -> None:
    """The job is requeued while its first ranks start."""
    process.stop_a_seat(world, gang, 3.0 + 3.0 * world.chance.random())
    service.slurm_requeues(world, gang)


def late_order(world: World, gang: str) -> None:
    """A generation ends while the coordinator does not reach one of its nodes."""
    wire.cut_from_coordinator(world, gang)
    process.kill_rank(world, gang)


def cut_off_and_reset(world: World, gang: str) -> None:
    """A node is cut off from all, and a rank dies at once: of its connection to that node, most likely."""
    wire.isolate(world, gang)
    process.kill_rank(world, gang)


SOON: dict[Phase, dict[tuple[Fault, float], float]] = {
    Phase.SUBMITTED: {(hardware.launcher, 0.0): 0.2},
    Phase.PREFLIGHT: {(ended_in_preflight, 0.0): 0.05},
    Phase.STARTING: {(requeued_at_the_start, 0.0): 0.02},
    Phase.RUNNING: {
        (wire.blind_phase, 2.5): 0.04,
        (wire.blind_spot, 3.5): 0.035,
        (wire.isolate, 2.0): 0.01,
        (cut_off_and_reset, 2.0): 0.04,
        (late_order, 2.0): 0.03,
        (wire.fabric, 6.0): 0.06,
        (wire.spare_alone, 4.0): 0.06,
        (hardware.echo, 3.0): 0.045,
        (hardware.unfit_then_worse, 3.0): 0.09,
        (hardware.degraded_then_worse, 3.0): 0.04,
        (process.stuck_storage, 1.2): 0.1,
        (process.declared_phase, 4.0): 0.07,
        (process.hang_rank, 7.0): 0.09,
        (process.sick_node, 1.5): 0.06,
        (process.agent_error, 3.0): 0.055,
        (service.storage, 3.0): 0.02,
        (service.preempt, 2.0): 0.15,  # it comes back to nodes that have kept its memory
        (service.cancel, 5.0): 0.005,
    },
    Phase.REQUEUED: {(service.another_job, 0.1): 0.15},
    Phase.FAILED: {(service.slurm_mute, 0.0): 0.5},
}
"""One of these strikes the first gang that comes to a phase, so many seconds later, before much else can have happened:
in which share of the seeds each."""
