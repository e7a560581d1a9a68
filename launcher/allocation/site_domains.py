"""What is known of the network beside Slurm's topology, and counts in a request: NVLink domains, racks, power feeds.

They stand in the site's fabric.toml. If it names no NVLink domains, those count that nodes report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster.fabric.model.node import FailureDomain, Node
from muster.fabric.sources.slurm_topology import SlurmTopology
from muster.launcher.errors import SiteFault
from muster.launcher.fabric import ReportedDomains, load_site_fabric
from muster.slurm.client.parsing.site_fabric import FABRIC_FILE


@dataclass(frozen=True, slots=True)
class SiteDomains:
    """What counts."""

    nvlink_blocks: bool = False
    """Each Slurm block is one NVLink domain."""
    nvlink_sizes: tuple[int, ...] = ()
    """Nodes of each NVLink domain that the file names."""
    problem: str = ""
    """Why the file does not count; empty if nothing is wrong."""
    apart: Mapping[FailureDomain, int] = field(default_factory=dict)
    """RACK and POWER, if the file names any: the most nodes of which no two share one."""
    reported: ReportedDomains | None = None
    """None: nobody was asked, or nobody answers."""

    @property
    def names_nvlink(self) -> bool:
        """Whether the file says which NVLink domains there are."""
        return self.nvlink_blocks or bool(self.nvlink_sizes)


NOTHING_SAID = SiteDomains()


def names_of(topologies: Sequence[SlurmTopology]) -> set[str]:
    """The nodes that the topologies name. Empty if Slurm has one flat topology."""
    units = (unit.nodes for topology in topologies for unit in topology.units)
    return {name for nodes in (*units, *(topology.members for topology in topologies)) for name in nodes if name}


def load_domains(names: Collection[str], path: Path = FABRIC_FILE) -> SiteDomains:
    """What `path` says of `names`, which are all nodes that Slurm has. A file that is wrong changes no request:
    `problem` says why. Without a file: nothing.
    """
    if not names or not path.exists():
        return NOTHING_SAID
    try:
        site = load_site_fabric(path, names)
    except SiteFault as error:
        return SiteDomains(problem=error.message)
    sizes = tuple(len(domain.nodes) for domain in site.domains if domain.nvlink)
    return SiteDomains(site.nvlink_blocks, sizes, apart=dict(_apart(site.details, len(names))))


def _apart(details: Sequence[Node], nodes: int) -> Iterator[tuple[FailureDomain, int]]:
    """What nobody knows is not shared: each node without a rack counts for itself."""
    for domain, named in (
        (FailureDomain.RACK, Counter(node.rack for node in details if node.rack)),
        (FailureDomain.POWER, Counter(node.power_feed for node in details if node.power_feed)),
    ):
        if named:
            yield domain, len(named) + nodes - named.total()
