"""Puts an estimate's inputs together: the job, the options, the accelerator and the places of the ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from muster.fabric.cost.accelerators import Accelerator, AcceleratorError
from muster.fabric.estimate.chip import chip_of
from muster.fabric.estimate.estimate import Estimate, Plan, calibrate, estimate
from muster.fabric.estimate.failures import HOUR, REPAIR, RESTART, WAIT_WITHOUT_SPARE, Failures, node_mtbf
from muster.fabric.estimate.spread import Seats
from muster.fabric.estimate.traffic import placement_weights, step_traffic
from muster.fabric.model.fabric import Fabric
from muster.fabric.placement.weights import Weights
from muster.launcher.errors import WrongInput
from muster.launcher.plan.assumptions import Default, Defaults, PlanOptions
from muster.launcher.plan.hardware import accelerator_of
from muster.launcher.plan.model_of_job import model_of, schedule_of
from muster.launcher.plan.places import placed_seats, usual_domains, usual_fabric, with_gpu_links
from muster.launcher.spec.spec import Job
from muster.wording import counted, percent, scaled


@dataclass(frozen=True, slots=True)
class SlurmFabric:
    """The network that Slurm has."""

    fabric: Fabric
    usable: frozenset[str]
    """Nodes that are in service."""
    speeds_known: bool
    """Whether the site's file gives the speed of a tier."""
    gpu: str = ""
    """The type of the nodes' GPUs in their GRES; the most frequent one, empty if none is typed."""


@dataclass(frozen=True, slots=True)
class PreparedPlan:
    """An estimate with its inputs."""

    job: Job
    accelerator: str
    entry: Accelerator
    plan: Plan
    estimate: Estimate
    fabric: str
    """Where the network comes from, in words."""
    calibrated: bool
    defaults: tuple[Default, ...]


def prepare(
    job: Job, options: PlanOptions, table: Mapping[str, Accelerator], slurm: SlurmFabric | None, no_slurm: str
) -> PreparedPlan:
    """The estimate of a job.

    Args:
        job: the job.
        options: the command line.
        table: accelerators by name.
        slurm: the network that Slurm has; None if nobody knows.
        no_slurm: why it is not known.

    Raises:
        WrongInput: the job, or the command line, can't be estimated. The message says what would be right.
    """
    defaults = Defaults()
    name, entry = accelerator_of(job, options.accelerator, slurm.gpu if slurm else "", table, defaults)
    model = model_of(job, defaults)
    schedule = schedule_of(job, model, defaults)
    try:
        chip = chip_of(entry, model.precision, options.efficiency)
    except AcceleratorError as error:
        raise WrongInput(f"{name}: {error}", "choose model.precision, or another --accelerator") from None
    except ValueError as error:
        raise WrongInput(str(error)) from None
    if not options.efficiency and not options.measured_step:
        source = "fitted to published runs" if entry.efficiency else "the H100's"
        words = f"{percent(chip.efficiency)} of {scaled(chip.peak, 'FLOP/s')}"
        defaults.take("matrix products", words, source, "--efficiency, --measured-step")
    weights = placement_weights(step_traffic(model, job.axes, schedule))
    seats, fabric = seats_of(job, weights, entry, slurm, no_slurm, defaults)
    plan = Plan(
        model=model,
        axes=job.axes,
        schedule=schedule,
        chip=chip,
        seats=seats,
        failures=_failures(job, options, entry, defaults),
        tokens=float(job.model.tokens or 0),
        price=options.price or 0.0,
        in_network=options.in_network,
    )
    if options.measured_step:
        try:
            plan = calibrate(plan, options.measured_step)
        except ValueError as error:
            raise WrongInput(f"--measured-step: {error}") from None
    return PreparedPlan(
        job, name, entry, plan, estimate(plan), fabric, options.measured_step is not None, tuple(defaults.taken)
    )


def seats_of(
    job: Job, weights: Weights, entry: Accelerator, slurm: SlurmFabric | None, no_slurm: str, defaults: Defaults
) -> tuple[Seats, str]:
    """The places of the ranks, and where the network comes from."""
    nics = entry.per_node if job.local_ranks > 1 else 1
    if slurm:
        fabric = slurm.fabric if slurm.speeds_known else with_gpu_links(slurm.fabric, entry)
        seats = placed_seats(job, weights, fabric, slurm.usable, nics)
        if seats:
            if not slurm.speeds_known:
                _note_speeds(entry, defaults)
            return seats, _in_words(slurm, seats)
        no_slurm = f"Slurm has {counted(len(slurm.usable), 'node', form=',')} in service"
    fabric = usual_fabric(job.nodes, entry)
    seats = placed_seats(job, weights, fabric, fabric.nodes, nics)
    assert seats  # the fabric was made for so many nodes
    defaults.take("network", usual_domains(entry), "usual", "run it with Slurm")
    _note_speeds(entry, defaults)
    return seats, f"a usual one, not Slurm's ({no_slurm}): {usual_domains(entry)}, full bisection"


def _in_words(slurm: SlurmFabric, seats: Seats) -> str:
    """Slurm's network, and whether links of their own speed count."""
    words = f"Slurm's, {counted(len(slurm.usable), 'node', form=',')} in service; as if all of them were free"
    known = seats.fabric
    own = sum(
        any(domain.uplink for domain in known.path(node)) or bool(known.node(node).uplink) for node in seats.nodes
    )
    return words + (f"; the links of {own} of its nodes have a speed of their own, which counts" if own else "")


def _note_speeds(entry: Accelerator, defaults: Defaults) -> None:
    words = f"{entry.link / 1e9:g} GB/s between GPUs, {entry.per_node} NICs of {entry.nic / 1e9:g} GB/s"
    defaults.take("links", words, "usual", "[tiers] of fabric.toml")


def _failures(job: Job, options: PlanOptions, entry: Accelerator, defaults: Defaults) -> Failures:
    mtbf_hours = options.node_mtbf if options.node_mtbf is not None else job.checkpoint.node_mtbf_hours or None
    if mtbf_hours is None:
        words = f"{node_mtbf(job.local_ranks) / HOUR:,.0f} h with {counted(job.local_ranks, 'GPU')}"
        defaults.take("MTBF of a node", words, "Llama 3's training in 2024", "--node-mtbf HOURS")
    if options.repair is None:
        defaults.take("repair of a node", f"{REPAIR / HOUR:g} h", "assumed", "--repair HOURS")
    if options.recovery is None:
        words = f"{RESTART:g} s and the transfer of the state"
        defaults.take("recovery", words, "make bench-recovery, worst run", "--recovery SECONDS")
    defaults.take("wait without a spare", f"{WAIT_WITHOUT_SPARE / HOUR:g} h", "assumed", "none")
    try:
        return Failures(
            nodes=job.nodes,
            spares=job.spares,
            node_mtbf=node_mtbf(job.local_ranks) if mtbf_hours is None else mtbf_hours * HOUR,
            repair=REPAIR if options.repair is None else options.repair * HOUR,
            restart=RESTART if options.recovery is None else options.recovery,
            node_bandwidth=entry.nic * entry.per_node,
        )
    except ValueError as error:
        raise WrongInput(f"failures: {error}") from None
