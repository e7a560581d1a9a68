"""Carries out `muster diagnose`: asks the coordinator and Slurm, measures links on request, prints the diagnosis."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

from muster.fabric.model.fabric import Fabric
from muster.fabric.model.node import natural_order
from muster.fabric.sources.nesting import fabric_of_leaves
from muster.fabric.sources.node_reports import with_nvlink_domains
from muster.launcher.command import connect, load_site, print_note, screen, show
from muster.launcher.coordinator_client import CoordinatorClient, gang_ref
from muster.launcher.diagnosis import seated_job
from muster.launcher.diagnosis.as_json import to_dict
from muster.launcher.diagnosis.diagnosis import Diagnosis, Network, diagnose, judged_links
from muster.launcher.diagnosis.links import links_to_measure, slow_links
from muster.launcher.diagnosis.screen import lines
from muster.launcher.errors import NotNow, Unavailable, WrongInput
from muster.launcher.output.last_words import last_words
from muster.launcher.plan.assumptions import Defaults, PlanOptions
from muster.launcher.plan.hardware import accelerator_of, load_table
from muster.launcher.plan.places import with_gpu_links
from muster.launcher.plan.prepare import SlurmFabric, prepare
from muster.launcher.plan.show import slurm_fabric
from muster.launcher.spec.spec import Job
from muster.slurm.client.backends.commands import CliSlurm
from muster.slurm.client.errors import SlurmError
from muster.v1.api_pb2 import GangView
from muster.v1.diagnosis_pb2 import JobMeasurements, LinkRate

MOST_MEASURING_S = 60.0
"""Seconds after which no further link is measured: about 80 links."""


async def run(options: argparse.Namespace) -> int:
    """Prints the diagnosis. Returns the exit status.

    Raises:
        LauncherError: the job is not known, or is another user's; or the coordinator does not answer.
    """
    async with connect(load_site(options)) as coordinator:
        measured = await coordinator.measurements(gang_ref(options.job))
        job = seated_job.job_of(measured.spec) if measured.HasField("spec") else None
        slurm, why = await _network(job, measured.gang)
        unknown: list[str] = []
        if options.measure:
            fabric = slurm.fabric if slurm else _fabric_of_leaves(measured.gang)
            unknown += await _measure(coordinator, measured, fabric, options.job)
            measured = await coordinator.measurements(gang_ref(options.job))
    found = _diagnosis(measured, job, slurm, why, unknown, options.accelerator)
    found = replace(found, last_words=await last_words(measured.gang))
    if options.json:
        print(json.dumps(to_dict(found)), flush=True)
    else:
        show(lines(found, screen(options)))
    return 0


async def _network(job: Job | None, gang: GangView) -> tuple[SlurmFabric | None, str]:
    """Slurm's network; or None, and why it is not known."""
    if job is None:
        return None, "the job's spec is not known"
    try:
        found = await slurm_fabric(CliSlurm(), job)
    except (Unavailable, SlurmError) as error:
        return None, f"Slurm does not answer: {error}"
    return replace(found, fabric=as_reported(found.fabric, gang)), ""


def _fabric_of_leaves(gang: GangView) -> Fabric:
    """The network as far as the coordinator tells it: the leaf of each node."""
    leaf_of = {rank.node: "" for rank in gang.ranks} | {node.node: node.leaf for node in gang.nodes}
    return as_reported(fabric_of_leaves(leaf_of or {"-": ""}), gang)


def as_reported(fabric: Fabric, gang: GangView) -> Fabric:
    """The fabric with what nodes report: NVLink domains, and adapters that are slower than their tier."""
    domains = {rank.node: rank.nvlink_domain for rank in gang.ranks}
    return with_nvlink_domains(fabric, domains, {node.node: node.adapter_bandwidth for node in gang.nodes})


async def _measure(
    coordinator: CoordinatorClient, measured: JobMeasurements, fabric: Fabric, job: str
) -> list[str]:  # fmt: skip
    """Measures links, one after another. Returns what could not be measured.

    Raises:
        NotNow: the job has no two nodes whose agents are attached.
    """
    here = [node for node in measured.gang.nodes if node.agent_attached and node.node in fabric.nodes]
    if len(here) < 2 or measured.gang.final:
        raise NotNow("nothing can be measured: the job has no two nodes with an agent now")
    attached = {node.node for node in here}
    ordered = [node for domain in fabric.root.walk() for node in sorted(domain.own_nodes & attached, key=natural_order)]
    slow = slow_links(judged_links(measured, Network(fabric, "", speeds_known=False)))
    suspected = {node.node for node in here if node.verdict != "FIT"} | {node for one in slow for node in one.nodes}
    failed, began = list[str](), time.monotonic()
    links = list(links_to_measure(ordered, suspected))
    for at, (sender, receiver) in enumerate(links):
        if time.monotonic() - began > MOST_MEASURING_S:
            return [*failed, f"{len(links) - at} of {len(links)} links: a minute of measuring is over"]
        try:
            rate: LinkRate = await coordinator.measure_link(gang_ref(job), sender, receiver)
            print_note(f"muster: {sender} to {receiver}: {rate.bytes / rate.seconds / 1e6:.0f} MB/s")
        except NotNow as error:
            failed.append(f"the link from {sender} to {receiver}: {error.message}")
    return failed


def _diagnosis(
    measured: JobMeasurements,
    job: Job | None,
    slurm: SlurmFabric | None,
    why: str,
    unknown: list[str],
    named: str | None,
) -> Diagnosis:
    if job is None:
        network = Network(_fabric_of_leaves(measured.gang), f"the leaves that the coordinator knows ({why})", False)
        return diagnose(measured, None, network, None, [*unknown, "the job's parallelism: its spec is not known"])
    table = load_table()
    _, entry = accelerator_of(job, named, slurm.gpu if slurm else "", table, Defaults())
    nics = entry.per_node if job.local_ranks > 1 else 1
    if slurm:
        known = slurm.fabric if slurm.speeds_known else with_gpu_links(slurm.fabric, entry)
        speeds = "with the site's speeds" if slurm.speeds_known else "with usual speeds: fabric.toml gives none"
        network = Network(known, f"Slurm's, {speeds}", slurm.speeds_known)
    else:
        known = with_gpu_links(_fabric_of_leaves(measured.gang), entry)
        network = Network(known, f"the leaves that the coordinator knows ({why})", False)
    plan = None
    try:
        plan = prepare(job, PlanOptions(accelerator=named), table, slurm, why).plan
    except (WrongInput, ValueError) as error:  # FabricError is one
        unknown = [*unknown, f"the predicted time of a step: {error}"]
    seated = seated_job.seated(measured, job, network.fabric, nics)
    if seated is None and measured.gang.ranks:
        unknown = [*unknown, "where its groups are: the network lacks a node of the job"]
    elif seated is None:
        unknown = [*unknown, "where its groups are: no node carries its ranks yet"]
    return diagnose(measured, seated, network, plan, unknown)
