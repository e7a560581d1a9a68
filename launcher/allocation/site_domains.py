"""What the site's fabric.toml says that Slurm does not know, and that counts in a request: NVLink domains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.fabric.sources.slurm_topology import SlurmTopology
from muster.launcher.errors import SiteFault
from muster.launcher.fabric import FABRIC_FILE, load_site_fabric


@dataclass(frozen=True, slots=True)
class SiteDomains:
    """The part of the file that counts."""

    nvlink_blocks: bool = False
    """Each Slurm block is one NVLink domain."""
    nvlink_sizes: tuple[int, ...] = ()
    """Nodes of each NVLink domain that the file names."""
    problem: str = ""
    """Why the file does not count; empty if nothing is wrong."""


NOTHING_SAID = SiteDomains()


def load_domains(topologies: Sequence[SlurmTopology], path: Path = FABRIC_FILE) -> SiteDomains:
    """What `path` says. A file that is wrong changes no request: `problem` says why. Without a file: nothing."""
    units = (unit.nodes for topology in topologies for unit in topology.units)
    names = {name for nodes in (*units, *(topology.members for topology in topologies)) for name in nodes if name}
    if not names or not path.exists():
        return NOTHING_SAID
    try:
        site = load_site_fabric(path, names)
    except SiteFault as error:
        return SiteDomains(problem=error.message)
    sizes = tuple(len(domain.nodes) for domain in site.domains if domain.nvlink)
    return SiteDomains(site.nvlink_blocks, sizes)
