"""What commands know of the network: what the site's file says, and what nodes have reported to the coordinator."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from muster.daemon.host import toml_text
from muster.daemon.transport.site_config import Site, SiteError
from muster.fabric.sources.node_reports import NodeReport
from muster.fabric.sources.site_file import SiteFabric
from muster.launcher.command import connect, print_note
from muster.launcher.errors import LauncherError, SiteFault, Unavailable
from muster.slurm.client.parsing.site_fabric import SiteFileError, read_site_file
from muster.slurm.client.types import Unknown
from muster.v1.api_pb2 import NodeView

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReportedDomains:
    """The NVLink domains of several nodes that nodes have reported to the coordinator."""

    sizes: tuple[int, ...] = ()
    """Nodes of each domain."""
    silent: int = 0
    """Nodes that Slurm has, and that have reported nothing."""


def known(answer: T | Unknown) -> T:
    """Slurm's answer.

    Raises:
        Unavailable: it is none.
    """
    if isinstance(answer, Unknown):
        raise Unavailable(f"Slurm's nodes and network are not known here: {answer.reason}")
    return answer


def load_site_fabric(path: Path, nodes: Collection[str]) -> SiteFabric:
    """What the site's file says of `nodes`, which are all nodes that Slurm has. Without a file: nothing.

    Raises:
        SiteFault: the file can't be read, or is wrong.
    """
    try:
        return read_site_file(path, nodes, toml_text.loads)
    except SiteFileError as error:
        raise SiteFault(str(error)) from None


async def ask_reports(options: argparse.Namespace) -> dict[str, NodeReport]:
    """The NVLink domain and the speed of the adapters of each node that has reported one. Empty where no coordinator is
    configured, and, with a note, where it can't be asked."""
    try:
        nodes = await _nodes(options)
    except (LauncherError, SiteError) as error:
        words = error.message if isinstance(error, LauncherError) else str(error)
        print_note(f"muster: what nodes report of NVLink and adapters is not known: {words}")
        return {}
    return {
        node.node: NodeReport(nvlink_domain=node.nvlink_domain, adapter_bandwidth=node.adapter_bandwidth)
        for node in nodes
        if node.nvlink_domain or node.adapter_bandwidth
    }


async def ask_domains(options: argparse.Namespace) -> ReportedDomains | None:
    """The NVLink domains that nodes report. None where no coordinator is configured, or it can't be asked."""
    try:
        nodes = await _nodes(options)
    except (LauncherError, SiteError):
        return None
    if not nodes:
        return None
    sizes = Counter(node.nvlink_domain for node in nodes if node.nvlink_domain)
    return ReportedDomains(tuple(sizes.values()), sum(not node.musterd_attached for node in nodes))


async def _nodes(options: argparse.Namespace) -> Sequence[NodeView]:
    """The roll call. Empty where no coordinator is configured.

    Raises:
        LauncherError: the coordinator does not answer.
        SiteError: a setting of the site is wrong.
    """
    site = Site.load(
        coordinator=options.coordinator,
        auth=options.auth,
        connections=options.connections,
        config=options.config,
        calls_coordinator=False,
    )
    if not site.coordinator:
        return ()
    async with connect(site) as coordinator:
        return (await coordinator.nodes()).nodes
