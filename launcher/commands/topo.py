"""`muster topo`: draws the network as Slurm has it, as a tree, with the state of each node and the jobs on it.

It asks Slurm's controller, and needs no coordinator. If there is one, it knows the NVLink domains that nodes report.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from muster.fabric.sources.node_reports import NodeReport, refine
from muster.fabric.sources.slurm_topology import Reading, SlurmTopology
from muster.fabric.sources.tiers import Tiers
from muster.launcher.command import Command, print_note, screen, show
from muster.launcher.errors import WrongInput
from muster.launcher.fabric import ask_reports, known, load_site_fabric
from muster.launcher.output import svg
from muster.launcher.output.fabric_tree import FabricPicture, JobUse, NodeUse, to_dict, tree_lines
from muster.launcher.output.screen import Screen
from muster.slurm.client.backends.commands import CliSlurm
from muster.slurm.client.parsing.hostlist import collapse
from muster.slurm.client.parsing.site_fabric import FABRIC_FILE, fabric_of
from muster.slurm.client.states import NodeState
from muster.slurm.client.types import Job, Node, Slurm

_TIMEOUT_S = 30.0
"""Seconds for each question to Slurm. A site of 12,500 nodes needs some of them."""
_STATE_ORDER = {state: at for at, state in enumerate(NodeState)}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topology", metavar="NAME", help="only this one of several topologies")
    parser.add_argument(
        "--fabric",
        metavar="FILE",
        type=Path,
        default=FABRIC_FILE,
        help=f"what the site says of its network; default: {FABRIC_FILE}",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="a line for each node")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each topology")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="write the tree as a picture, too")


async def _run(options: argparse.Namespace) -> int:
    pictures = await load(CliSlurm(), options.fabric, options.topology, await ask_reports(options))
    for picture in pictures:
        if options.json:
            print(json.dumps(to_dict(picture)))
            continue
        show(tree_lines(picture, screen(), verbose=options.verbose))
    for picture in pictures:
        for warning in picture.warnings:
            print_note(f"muster: {warning}")
    if options.svg:
        _write_svg(options.svg, pictures, options.verbose)
    return 0


COMMAND = Command(_arguments, _run)
_NO_REPORTS: Mapping[str, NodeReport] = {}


async def load(
    slurm: Slurm, file: Path, only: str | None = None, reports: Mapping[str, NodeReport] = _NO_REPORTS
) -> list[FabricPicture]:
    """All topologies that Slurm has, or the one named `only`, with what runs on them. `file` is the site's fabric.toml,
    `reports` what nodes say of themselves.

    Raises:
        Unavailable: Slurm does not answer.
        WrongInput: Slurm has no topology of that name.
        SiteFault: the site's file is wrong.
    """
    topologies = known(await slurm.topologies(timeout_s=_TIMEOUT_S))
    nodes = known(await slurm.nodes(timeout_s=_TIMEOUT_S))
    jobs = known(await slurm.jobs(timeout_s=_TIMEOUT_S))
    if only is not None and only not in (topology.name for topology in topologies):
        names = ", ".join(topology.name for topology in topologies if topology.name) or "one topology, without a name"
        raise WrongInput(f"Slurm has no topology {only[:80]!r}; it has {names}")
    present = {name: node for name, node in nodes.items() if isinstance(node, Node)}
    uses = _uses(present.values(), [job for job in jobs.values() if isinstance(job, Job)])
    site = load_site_fabric(file, present)
    alone = len(topologies) == 1
    return [
        _picture(topology, _refined(fabric_of(topology, present, site, alone=alone), reports, site.tiers), uses)
        for topology in topologies
        if only is None or topology.name == only
    ]


def _refined(read: Reading, reports: Mapping[str, NodeReport], tiers: Tiers) -> Reading:
    refined = refine(read.fabric, reports, tiers)
    return Reading(refined.fabric, (*read.warnings, *refined.warnings))


def _picture(topology: SlurmTopology, read: Reading, uses: Mapping[str, NodeUse]) -> FabricPicture:
    return FabricPicture(
        read.fabric,
        uses,
        kind=topology.kind.value,
        name=topology.name,
        partitions=topology.partitions,
        default=topology.default,
        warnings=read.warnings,
        collapse=collapse,
    )


def _uses(nodes: Iterable[Node], jobs: Iterable[Job]) -> dict[str, NodeUse]:
    on_node: dict[str, list[JobUse]] = {}
    for job in sorted(jobs, key=lambda job: job.id):
        for node in job.held_nodes:
            on_node.setdefault(node, []).append(JobUse(job.id, job.name, job.user_name))
    return {
        node.name: NodeUse(
            (*(state.value for state in sorted(node.states, key=_STATE_ORDER.__getitem__)), *node.unrecognised),
            tuple(on_node.get(node.name, ())),
            node.reason,
        )
        for node in nodes
    }


def _write_svg(path: Path, pictures: list[FabricPicture], verbose: bool) -> None:
    """Writes the tree as a picture.

    Raises:
        WrongInput: the file can't be written.
    """
    lines = [line for picture in pictures for line in tree_lines(picture, Screen(paint=svg.paint), verbose=verbose)]
    try:
        path.write_text(svg.svg_of(lines, "muster topo"))
    except OSError as error:
        raise WrongInput(f"{path} can't be written: {error.strerror}") from None
