"""What nodes have reported of themselves to the coordinator, for commands that draw the network without needing it."""

from __future__ import annotations

import argparse

from muster.daemon.transport.site_config import Site, SiteError
from muster.fabric.sources.node_reports import NodeReport
from muster.launcher.command import connect, print_note
from muster.launcher.errors import LauncherError


async def ask_reports(options: argparse.Namespace) -> dict[str, NodeReport]:
    """The NVLink domain of each node that has one. Empty where no coordinator is configured, and, with a note, where it
    can't be asked."""
    try:
        site = Site.load(
            coordinator=options.coordinator,
            auth=options.auth,
            connections=options.connections,
            config=options.config,
            calls_coordinator=False,
        )
        if not site.coordinator:
            return {}
        async with connect(site) as coordinator:
            nodes = (await coordinator.nodes()).nodes
    except (LauncherError, SiteError) as error:
        words = error.message if isinstance(error, LauncherError) else str(error)
        print_note(f"muster: the NVLink domains that nodes report are not shown: {words}")
        return {}
    return {node.node: NodeReport(nvlink_domain=node.nvlink_domain) for node in nodes if node.nvlink_domain}
