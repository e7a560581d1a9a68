"""What can go wrong: every fault with its weight, and those that lie in wait for a phase.

A fault is a verb on the world. Whatever can be mended is mended by the verb itself after a while.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from muster.daemon.coordinator.core.states import Phase
from muster.daemon.coordinator.simulator import hardware_faults as hardware
from muster.daemon.coordinator.simulator import process_faults as process
from muster.daemon.coordinator.simulator import service_faults as service
from muster.daemon.coordinator.simulator import wire_faults as wire
from muster.daemon.coordinator.simulator.world import World

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
SOON: tuple[tuple[Fault, float, float], ...] = (
    (wire.blind_phase, 0.15, 2.5),
    (wire.blind_spot, 0.08, 3.5),
    (wire.isolate, 0.15, 2.0),
    (wire.fabric, 0.15, 6.0),
    (wire.spare_alone, 0.2, 4.0),
    (hardware.echo, 0.1, 3.0),
    (process.stuck_storage, 0.3, 3.0),
    (process.declared_phase, 0.15, 4.0),
    (process.hang_rank, 0.04, 6.0),
    (process.sick_node, 0.07, 3.0),
    (process.agent_error, 0.03, 3.0),
    (service.storage, 0.07, 3.0),
    (hardware.unfit_then_worse, 0.03, 3.0),
)
"""What strikes the first gang soon after it runs, before much else can have happened: in which share of the seeds, and
after how many seconds."""
EARLY = (
    *[Phase.SUBMITTED] * 3, *[Phase.GATHERING] * 2, *[Phase.PREFLIGHT] * 5, *[Phase.STARTING] * 5,
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


def come_and_go(world: World) -> None:
    """The first gang that runs is preempted after a few steps, before much else can have happened: it comes back to
    nodes that have kept its memory."""
    soon(world, service.preempt, 2.0)


def soon(world: World, fault: Fault, after_s: float, phase: Phase = Phase.RUNNING) -> None:
    """So long after the first gang has come to this phase it is struck."""
    world.ambushes.append((phase, lambda gang: world.schedule.later(after_s, _count, world, fault, gang)))


def _count(world: World, fault: Fault, gang: str) -> None:
    if fault is not service.crash_coordinator:  # counted when it does die
        world.tally.count("fault", fault.__name__.replace("_", " "))
    fault(world, gang)
