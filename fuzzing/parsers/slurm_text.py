"""What Slurm prints as text: node lists, the topology, errors, starts; and batch scripts for the in-memory Slurm."""

import yaml  # noqa: F401  # topology_conf imports it when it is needed, and that would count as work for the input

from muster.fabric.sources.slurm_topology import Kind, SlurmTopology, read_fabric
from muster.fabric.sources.tiers import Tiers
from muster.slurm.client.errors import SlurmError
from muster.slurm.client.parsing import (
    error_messages,
    hostlist,
    sbatch_request,
    start_text,
    topology_conf,
    topology_text,
)
from muster.slurm.client.types import StartEstimate

_MOST_CHARS = hostlist.MAX_NAMES * hostlist.MAX_NAME_CHARS


def check(data: bytes) -> None:
    """Each line of `data` as each of these texts."""
    text = data.decode(errors="replace")
    for line in text.split("\n"):
        _check_list(line)
        assert isinstance(error_messages.to_error("look", line), SlurmError)
    _check_fabric(text)
    assert start_text.max_switch_wait_s(text) >= 0
    try:
        assert isinstance(start_text.read(text), StartEstimate)
    except ValueError:
        pass
    try:
        assert sbatch_request.read_request(text, (), "/").work_dir == "/"
    except ValueError:
        pass


def _check_fabric(text: str) -> None:
    """Any text becomes fabrics of all nodes. What is not understood becomes a flat one, with a warning."""
    _check_topology(topology_text.read(text))
    try:
        named = topology_conf.read(text)
    except ValueError:
        return
    for topology in named:
        _check_topology(topology)


def _check_topology(topology: SlurmTopology) -> None:
    nodes = {name for unit in topology.units for name in unit.nodes if name}
    read = read_fabric(topology, nodes, Tiers())
    assert read.fabric.nodes == nodes
    flat = not read.fabric.root.children
    assert read.warnings or not topology.problem
    assert flat or topology.kind is not Kind.FLAT
    for unit in topology.units if not flat else ():
        named = set(unit.nodes) - {""}
        assert not named or any(domain.nodes == named for domain in read.fabric.root.walk())


def _check_list(line: str) -> None:
    try:
        names = hostlist.expand(line)
    except ValueError:
        return
    assert len(names) <= hostlist.MAX_NAMES
    assert all(len(name) <= hostlist.MAX_NAME_CHARS for name in names)
    assert "[" in line or len(names) <= line.count(",") + 1
