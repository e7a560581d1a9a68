"""Carries out `muster plan`: reads job.toml and Slurm's network, prints the estimate."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from muster.fabric.sources.node_reports import NodeReport, refine
from muster.fabric.sources.tiers import Tiers
from muster.launcher.allocation.ask import topology_of
from muster.launcher.allocation.site_domains import load_domains
from muster.launcher.command import print_note, screen, show
from muster.launcher.errors import Unavailable
from muster.launcher.fabric import ask_reports, known, load_site_fabric
from muster.launcher.plan import unpriced
from muster.launcher.plan.as_json import to_dict
from muster.launcher.plan.assumptions import PlanOptions
from muster.launcher.plan.foresight import foresee
from muster.launcher.plan.hardware import TYPED_GRES, load_table
from muster.launcher.plan.prepare import SlurmFabric, prepare
from muster.launcher.plan.screen import lines
from muster.launcher.plan.unpriced import is_priced
from muster.launcher.spec import spec
from muster.launcher.spec.spec import Job
from muster.slurm.client.backends.commands import CliSlurm
from muster.slurm.client.errors import SlurmError
from muster.slurm.client.parsing.site_fabric import FABRIC_FILE, fabric_of
from muster.slurm.client.states import NodeState
from muster.slurm.client.types import Node, Slurm

_TIMEOUT_S = 10.0
"""Seconds for each question to Slurm. Without an answer, the estimate takes a usual network."""
_OUT_OF_SERVICE = frozenset({NodeState.DOWN, NodeState.DRAIN, NodeState.FAIL})


async def run(options: argparse.Namespace) -> int:
    """Prints the estimate. Returns the exit status.

    Raises:
        LauncherError: job.toml, the command line or a file of the site is wrong.
    """
    job = spec.load(options.job, options)
    given = PlanOptions(
        accelerator=options.accelerator,
        efficiency=options.efficiency,
        measured_step=options.measured_step,
        node_mtbf=options.node_mtbf,
        repair=options.repair,
        recovery=options.recovery,
        price=options.price,
        in_network=options.in_network,
    )
    network, why = None, "--no-slurm"
    if not options.no_slurm:
        try:
            network, why = await slurm_fabric(CliSlurm(), job, await ask_reports(options)), ""
        except (Unavailable, SlurmError) as error:
            why = "Slurm does not answer"
            print_note(f"muster: {error}")
    if is_priced(job, given):
        prepared = prepare(job, given, load_table(), network, why)
        _print(options, to_dict(prepared), lines(prepared, screen()))
    else:
        places = unpriced.unpriced(job, given, load_table(), network, why)
        _print(options, unpriced.to_dict(places), unpriced.lines(places, screen()))
    return 0


def _print(options: argparse.Namespace, record: dict[str, Any], text: Iterator[str]) -> None:
    if options.json:
        print(json.dumps(record), flush=True)
    else:
        show(text)


_NO_REPORTS: Mapping[str, NodeReport] = {}


async def slurm_fabric(slurm: Slurm, job: Job, reports: Mapping[str, NodeReport] = _NO_REPORTS) -> SlurmFabric:
    """The topology of the job's partition, with what the site's file adds, and what nodes report of themselves.

    Raises:
        Unavailable: Slurm does not answer.
        SiteFault: the site's file is wrong.
    """
    answers = await asyncio.gather(slurm.topologies(timeout_s=_TIMEOUT_S), slurm.nodes(timeout_s=_TIMEOUT_S))
    topologies, nodes = known(answers[0]), known(answers[1])
    found = {node.name: node for node in nodes.values() if isinstance(node, Node)}
    site = load_site_fabric(FABRIC_FILE, found)
    partition = job.slurm.partition
    topology = topology_of(topologies, partition)
    reading = fabric_of(topology, found, site, alone=len(topologies) == 1)
    refined = refine(reading.fabric, reports, site.tiers)
    for warning in (*reading.warnings, *refined.warnings):
        print_note(f"muster: {warning}")
    usable = [
        node
        for node in found.values()
        if not node.states & _OUT_OF_SERVICE
        and node.name in reading.fabric.nodes
        and (partition is None or partition in node.partitions)
    ]
    partitions = {name for node in found.values() for name in node.partitions}
    for line in foresee(job, topology, load_domains(found), usable, partitions):
        print_note(f"muster: {line}")
    types = Counter(typed.group(1) for node in usable if (typed := TYPED_GRES.search(node.gres)))
    gpu = max(types, key=lambda name: types[name], default="")
    return SlurmFabric(refined.fabric, frozenset(node.name for node in usable), site.tiers != Tiers(), gpu)
