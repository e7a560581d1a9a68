"""The site's fabric: what Slurm's controller says of the network, and what the site's own file adds."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from muster.daemon.transport import toml_text
from muster.fabric.model import node as fabric_node
from muster.fabric.model.errors import FabricError
from muster.fabric.sources.site_file import SiteFabric, read_site
from muster.fabric.sources.slurm_topology import Reading, SlurmTopology, read_fabric
from muster.launcher.errors import SiteFault, Unavailable
from muster.slurm.client.parsing import gres
from muster.slurm.client.parsing.hostlist import expand
from muster.slurm.client.types import Node, Unknown

FABRIC_FILE = Path("/etc/muster/fabric.toml")
T = TypeVar("T")


def known(answer: T | Unknown) -> T:
    """Slurm's answer.

    Raises:
        Unavailable: it is none.
    """
    if isinstance(answer, Unknown):
        raise Unavailable(f"Slurm does not answer: {answer.reason}")
    return answer


def load_site_fabric(path: Path, nodes: Collection[str]) -> SiteFabric:
    """What the site's file says of `nodes`, which are all nodes that Slurm has. Without a file: nothing.

    Raises:
        SiteFault: the file can't be read, or is wrong.
    """
    try:
        return read_site(toml_text.loads(path.read_text()), expand, nodes)
    except FileNotFoundError:
        return SiteFabric()
    except OSError as error:
        raise SiteFault(f"{path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SiteFault(f"{path} is not TOML: {error}") from None
    except FabricError as error:
        raise SiteFault(f"{path}: {error}") from None


def fabric_of(topology: SlurmTopology, nodes: Mapping[str, Node], site: SiteFabric, *, alone: bool) -> Reading:
    """The fabric of one topology. Where Slurm has several, each has the nodes of its partitions only.

    Slurm knows how many GPUs a node has. What the site's file says comes first.

    Args:
        nodes: all nodes that Slurm has.
        alone: whether this is Slurm's only topology.
    """
    named = {name for unit in topology.units for name in unit.nodes if name}
    shown = named | (set(nodes) if alone else set(topology.members))
    details = {
        name: fabric_node.Node(name, gpus=gres.count_gpus(node.gres) or 0) for name, node in nodes.items() if node.gres
    }
    for node in site.details:
        known_gpus = details[node.name].gpus if node.name in details else 0
        details[node.name] = node if node.gpus else replace(node, gpus=known_gpus)
    return read_fabric(topology, shown, site.tiers, tuple(details.values()), site.extra(topology))
