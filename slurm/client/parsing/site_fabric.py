"""The site's fabric: what Slurm's controller says of the network, and what the site's own file adds.

The launcher and the coordinator both read it here, so a plan has the network on which ranks are placed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from muster.fabric.model import node as fabric_node
from muster.fabric.model.errors import FabricError
from muster.fabric.sources.site_file import SiteFabric, read_site
from muster.fabric.sources.slurm_topology import Reading, SlurmTopology, read_fabric
from muster.slurm.client.parsing import gres
from muster.slurm.client.parsing.hostlist import expand
from muster.slurm.client.types import Node

FABRIC_FILE = Path("/etc/muster/fabric.toml")
MOST_BYTES = 64 * 2**20
"""A larger file is a mistake: 12,500 nodes with all that can be said of them take 5 MiB."""


class SiteFileError(ValueError):
    """The site's file can't be read, or is wrong. The message names the file and the key."""


def read_site_file(path: Path, nodes: Collection[str], loads: Callable[[str], dict[str, Any]]) -> SiteFabric:
    """What the site's file says of `nodes`, which are all nodes that Slurm has. Without a file: nothing.

    Args:
        loads: parses TOML. Raises tomllib.TOMLDecodeError.

    Raises:
        SiteFileError: the file can't be read, or is wrong.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise SiteFileError(f"{path} has more than {MOST_BYTES >> 20} MiB")
        return read_site(loads(path.read_text()), expand, nodes)
    except FileNotFoundError:
        return SiteFabric()
    except OSError as error:
        raise SiteFileError(f"{path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SiteFileError(f"{path} is not TOML: {error}") from None
    except FabricError as error:
        raise SiteFileError(f"{path}: {error}") from None


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
