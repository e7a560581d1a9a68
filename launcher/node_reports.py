"""What nodes have reported of themselves to the coordinator, for commands that draw the network without needing it."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

from muster.daemon.transport.site_config import Site, SiteError
from muster.fabric.sources.node_reports import NodeReport
from muster.launcher.command import connect, print_note
from muster.launcher.errors import LauncherError
from muster.launcher.fabric import ReportedDomains
from muster.v1.api_pb2 import NodeView


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
