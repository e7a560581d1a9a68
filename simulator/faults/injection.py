"""Every fault with its weight, and faults that are armed: they strike when a gang enters a phase."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.simulator.faults import hardware_faults as hardware
from muster.simulator.faults import network_faults as network
from muster.simulator.faults import process_faults as process
from muster.simulator.faults import service_faults as service
from muster.simulator.world.world import World

Fault = Callable[[World, str], None]
"""Injects a fault that aims at a gang. If there is nothing to strike, it does nothing."""

FAULTS: dict[Fault, float] = {
    hardware.crash_node: 4,
    hardware.power_off_node: 4,
    hardware.power_off_rack: 4,
    hardware.freeze_node: 4,
    process.stop_agent: 2,
    process.stop_node_daemon: 1,
    process.stop_agent_and_daemon: 7,
    process.kill_agent: 2,
    process.kill_node_daemon: 1,
    process.kill_rank: 5,
    process.crash_ranks_on_node: 17,
    process.crash_script_repeatedly: 3.2,
    process.unkillable_ranks: 1,
    process.hang_rank: 9.5,
    process.hang_ranks_on_node: 7,
    process.silence_rank: 4,
    process.declared_phase: 4,
    process.agent_error: 4,
    hardware.hardware_signal: 4,
    hardware.precursor: 16,
    hardware.passing_precursor: 6,
    hardware.degraded_then_failure: 16,
    network.cut_link: 2,
    network.cut_from_coordinator: 7,
    network.cut_from_coordinator_during_crash: 3,
    network.isolate_node: 7,
    network.isolate_node_with_resets: 4,
    network.isolate_coordinator: 5,
    network.partition: 1.5,
    network.flap_link: 1.5,
    service.crash_coordinator: 5,
    service.stall_coordinator: 2.5,
    service.slurm_unresponsive: 1,
    service.slurm_unreliable: 1,
    service.requeue_job: 9.5,
    service.preempt_job: 4,
    service.give_node_back: 1.5,
    service.cancel_gang: 0.6,
    service.scancel_job: 0.5,
    service.fail_batch_script: 0.9,
    service.clear_requeue_flag: 0.7,
    hardware.unfit_then_failure: 24,
    hardware.power_off_with_holder: 2,
    service.request_flush: 1,
    service.fail_durable_storage: 1.4,
    service.false_accusation: 1,
    service.request_swap: 8,
    service.request_drain: 4,
    hardware.flip_bit: 10,
}
"""Every fault with its weight. The weights make every transition and recovery occur in 2,000 seeds."""
JOB_ENDING_FAULTS: tuple[Fault, ...] = (
    service.cancel_gang, service.cancel_gang, service.scancel_job,
    service.fail_batch_script, service.fail_batch_script, service.fail_batch_script,
    service.requeue_job, service.requeue_job, service.requeue_job, service.requeue_job,
)  # fmt: skip
DISTURBING_FAULTS: tuple[Fault, ...] = (
    service.crash_coordinator,
    service.crash_coordinator,
    service.crash_coordinator,
    process.kill_rank,
    hardware.power_off_node,
    hardware.freeze_node,
    hardware.hardware_signal,
    network.isolate_node,
    process.stop_agent_and_daemon,
    service.fail_durable_storage,
    service.fail_durable_storage,
)
EARLY_PHASES = (
    *[Phase.SUBMITTED] * 3, *[Phase.GATHERING] * 2, *[Phase.PREFLIGHT] * 6, *[Phase.STARTING] * 5,
    *[Phase.RUNNING] * 2, *[Phase.RECOVERING] * 2,
)  # fmt: skip
LATE_PHASES = (Phase.DRAINING, Phase.REQUEUED)
SHORT_PHASES = (Phase.PREFLIGHT, Phase.STARTING, Phase.RECOVERING, Phase.DRAINING)
"""Phases that last only a moment. An agent is stopped first, so that the phase lasts."""


def inject(world: World, gang: str) -> None:
    """Inject one fault, chosen by weight, and often a second one."""
    for fault in world.rng.choices(list(FAULTS), list(FAULTS.values()), k=world.rng.choice([1, 2])):
        _inject_counted(world, fault, gang)


def arm_random(world: World, phases: Sequence[Phase]) -> None:
    """Arm a random fault: it strikes when a gang enters one of `phases`."""
    phase = world.rng.choice(phases)
    fault = world.rng.choice(JOB_ENDING_FAULTS if world.rng.random() < 0.6 else DISTURBING_FAULTS)
    prolongs = phase in SHORT_PHASES and fault in JOB_ENDING_FAULTS

    def strike(gang: str) -> None:
        delay = max(0.0, 0.4 * world.rng.random() - 0.2)
        if prolongs:
            process.stop_agent_of_seat(world, gang, 3.0 + 3.0 * world.rng.random())
            delay = 0.0
        world.schedule.call_later(delay, _inject_counted, world, fault, gang)

    world.armed_faults.append((phase, strike))


def arm(world: World, fault: Fault, after_s: float, phase: Phase = Phase.RUNNING) -> None:
    """Arm a fault: it strikes `after_s` seconds after the first gang has entered `phase`."""
    world.armed_faults.append(
        (phase, lambda gang: world.schedule.call_later(after_s, _inject_counted, world, fault, gang))
    )


def _inject_counted(world: World, fault: Fault, gang: str) -> None:
    if fault is not service.crash_coordinator:  # it is counted when the process ends
        world.coverage.count("fault", fault.__name__.replace("_", " "))
    fault(world, gang)


def fail_during_preflight(world: World, gang: str) -> None:
    """The batch script fails while the preflight lasts."""
    process.stop_agent_of_seat(world, gang, 3.0 + 3.0 * world.rng.random())
    service.fail_batch_script(world, gang)


def requeue_during_start(world: World, gang: str) -> None:
    """The job is requeued while its first ranks start."""
    process.stop_agent_of_seat(world, gang, 3.0 + 3.0 * world.rng.random())
    service.requeue_job(world, gang)


def crash_rank_behind_cut(world: World, gang: str) -> None:
    """A generation ends while the coordinator is unable to reach one of its nodes."""
    network.cut_from_coordinator(world, gang)
    process.kill_rank(world, gang)


def isolate_node_and_crash_rank(world: World, gang: str) -> None:
    """A node is cut off from all hosts, and a rank crashes at once, probably because its connection to that node
    broke."""
    network.isolate_node(world, gang)
    process.kill_rank(world, gang)


def signal_while_coordinator_is_down(world: World, gang: str) -> None:
    """A node's hardware fails, and the restarted coordinator hears of it before all agents have attached again."""
    world.coordinator_restart_s = 2.0
    if world.coordinator.alive:
        world.crash_coordinator("by itself")
    hardware.hardware_signal(world, gang)


def crash_rank_while_coordinator_is_down(world: World, gang: str) -> None:
    """A rank crashes while nobody coordinates, and peers often crash because of that."""
    world.coordinator_restart_s = 2.0
    if world.coordinator.alive:
        world.crash_coordinator("by itself")
    process.kill_rank(world, gang)


def isolate_before_newcomer(world: World, gang: str) -> None:
    """The node that carries all ranks is isolated as its only spare is about to come back with a job of its own:
    neither hears of the other."""
    known = world.gang(gang)
    if known is not None and len(known.roster.seats) == 1 and hardware.repair_spare(world, gang):
        _isolate_once_requested(world, gang, known.roster.seats[0].node)


def _isolate_once_requested(world: World, gang: str, node: str) -> None:
    known = world.gang(gang)
    if known is None or known.final:
        return
    if any(request.job and not request.node for request in known.growth.pool.values()):
        network.isolate_for_long(world, node)
    else:
        world.schedule.call_later(0.1, _isolate_once_requested, world, gang, node)


@dataclass(frozen=True, slots=True)
class Draw:
    """In each seed at most one of these faults is armed: it strikes when the first gang has entered `phase`.

    `name`: it has a random generator of its own. So a change, or another draw, leaves all others as they are.
    `shares`: each fault, with the seconds after which it strikes, and the share of seeds in which it is armed.
    """

    name: str
    phase: Phase
    shares: Mapping[tuple[Fault, float], float]

    def arm(self, world: World, seed: int) -> None:
        """Arm the fault that this seed has, if any."""
        remainder = random.Random(f"{self.name} {seed}").random()
        for (fault, after_s), share in self.shares.items():
            if 0 <= remainder < share:
                arm(world, fault, after_s, self.phase)
            remainder -= share


ARMED_FAULTS = (
    Draw("SUBMITTED", Phase.SUBMITTED, {(hardware.crash_batch_host, 0.0): 0.2}),
    Draw("PREFLIGHT", Phase.PREFLIGHT, {(fail_during_preflight, 0.0): 0.05}),
    Draw("STARTING", Phase.STARTING, {(requeue_during_start, 0.0): 0.02}),
    Draw(
        "RUNNING",
        Phase.RUNNING,
        {
            (network.cut_from_coordinator_during_phase, 2.5): 0.04,
            (network.cut_from_coordinator_during_crash, 3.5): 0.05,
            (network.isolate_node, 2.0): 0.01,
            (isolate_node_and_crash_rank, 2.0): 0.04,
            (crash_rank_behind_cut, 2.0): 0.03,
            (signal_while_coordinator_is_down, 3.0): 0.02,
            (network.isolate_node_with_resets, 6.0): 0.06,
            (network.isolate_spare, 4.0): 0.06,
            (hardware.correlated_signal, 3.0): 0.045,
            (hardware.precursor, 2.5): 0.07,
            (hardware.unfit_then_failure, 3.0): 0.05,
            (hardware.degraded_then_failure, 3.0): 0.03,
            (process.stuck_shared_storage, 1.2): 0.075,
            (process.declared_phase, 4.0): 0.06,
            (process.hang_rank, 7.0): 0.05,
            (process.silence_rank, 5.0): 0.03,
            (process.crash_ranks_on_node, 1.5): 0.06,
            (process.agent_error, 3.0): 0.055,
            (service.fail_durable_storage, 3.0): 0.01,
            (service.preempt_job, 2.0): 0.15,  # the next run finds the memory that its nodes have kept
            (service.cancel_gang, 5.0): 0.005,
        },
    ),
    Draw(
        "more",
        Phase.RUNNING,
        {
            (process.hang_rank, 6.0): 0.12,
            (service.preempt_job, 6.0): 0.14,
            (hardware.unfit_then_failure, 5.0): 0.04,
            (process.crash_ranks_on_node, 5.0): 0.02,
            (service.fail_batch_script, 3.0): 0.04,
        },
    ),
    Draw("unseen crash", Phase.RUNNING, {(crash_rank_while_coordinator_is_down, 3.5): 0.03}),
    Draw("newcomer", Phase.RUNNING, {(isolate_before_newcomer, 1.0): 0.5}),
    Draw("DRAINING", Phase.DRAINING, {(service.fail_durable_storage, 0.0): 0.07}),
    Draw("REQUEUED", Phase.REQUEUED, {(service.start_other_job, 0.1): 0.15}),
    Draw("FAILED", Phase.FAILED, {(service.slurm_unresponsive, 0.0): 0.5}),
)
"""Faults that would be too rare at random moments."""
