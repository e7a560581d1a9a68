"""`muster topo`: draws the network as Slurm has it, as a tree, with the state of each node and the jobs on it.

It asks Slurm's controller, and needs no coordinator.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from muster.fabric.sources.slurm_topology import Kind, SlurmTopology, read_fabric
from muster.fabric.sources.tiers import Tiers
from muster.launcher.command import Command, print_note, word_painter
from muster.launcher.errors import Unavailable, WrongInput
from muster.launcher.output import svg
from muster.launcher.output.fabric_tree import FabricPicture, JobUse, NodeUse, to_dict, tree_lines
from muster.slurm.client.backends.commands import CliSlurm
from muster.slurm.client.parsing.hostlist import collapse
from muster.slurm.client.states import NodeState
from muster.slurm.client.types import Job, Node, Slurm, Unknown

T = TypeVar("T")
_TIMEOUT_S = 30.0
"""Seconds for each question to Slurm. A site of 12,500 nodes needs some of them."""
_STATE_ORDER = {state: at for at, state in enumerate(NodeState)}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topology", metavar="NAME", help="only this one of several topologies")
    parser.add_argument("-v", "--verbose", action="store_true", help="a line for each node")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each topology")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="write the tree as a picture, too")


async def _run(options: argparse.Namespace) -> int:
    pictures = await load(CliSlurm(), options.topology)
    for picture in pictures:
        if options.json:
            print(json.dumps(to_dict(picture)))
            continue
        for line in tree_lines(picture, word_painter(), verbose=options.verbose):
            print(line)
    sys.stdout.flush()
    for picture in pictures:
        for warning in picture.warnings:
            print_note(f"muster: {warning}")
    if options.svg:
        _write_svg(options.svg, pictures, options.verbose)
    return 0


COMMAND = Command("topo", "draw the network with the state of its nodes", _arguments, _run, remote=False)


async def load(slurm: Slurm, only: str | None = None) -> list[FabricPicture]:
    """All topologies that Slurm has, or the one named `only`, with what runs on them.

    Raises:
        Unavailable: Slurm does not answer.
        WrongInput: Slurm has no topology of that name.
    """
    topologies = _known(await slurm.topologies(timeout_s=_TIMEOUT_S))
    nodes = _known(await slurm.nodes(timeout_s=_TIMEOUT_S))
    jobs = _known(await slurm.jobs(timeout_s=_TIMEOUT_S))
    if only is not None and only not in (topology.name for topology in topologies):
        names = ", ".join(topology.name for topology in topologies if topology.name) or "one topology, without a name"
        raise WrongInput(f"Slurm has no topology {only[:80]!r}; it has {names}")
    uses = _uses(
        [node for node in nodes.values() if isinstance(node, Node)],
        [job for job in jobs.values() if isinstance(job, Job)],
    )
    return [
        _picture(topology, uses, alone=len(topologies) == 1)
        for topology in topologies
        if only is None or topology.name == only
    ]


def _known(answer: T | Unknown) -> T:
    if isinstance(answer, Unknown):
        raise Unavailable(f"Slurm does not answer: {answer.reason}")
    return answer


def _picture(topology: SlurmTopology, uses: Mapping[str, NodeUse], *, alone: bool) -> FabricPicture:
    """A node that only the topology has stays on the map, as absent. Where there are several topologies, each shows its
    own nodes only.
    """
    named = {name for unit in topology.units for name in unit.nodes if name}
    nodes = named | set(uses) if alone or topology.kind is Kind.FLAT else named
    read = read_fabric(topology, nodes, Tiers())
    return FabricPicture(
        read.fabric, uses, topology.kind.value, topology.name, topology.default, read.warnings, collapse
    )


def _uses(nodes: list[Node], jobs: list[Job]) -> dict[str, NodeUse]:
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
    lines = [line for picture in pictures for line in tree_lines(picture, svg.paint, verbose=verbose)]
    try:
        path.write_text(svg.svg_of(lines, "muster topo"))
    except OSError as error:
        raise WrongInput(f"{path} can't be written: {error.strerror}") from None
