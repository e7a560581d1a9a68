"""`muster nodes`: every node that the coordinator knows, and its verdict."""

from __future__ import annotations

import argparse

from muster.launcher.command import Command, connect, console, load_site
from muster.launcher.json_text import to_json
from muster.launcher.tables import node_table


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one NodeView (api.proto) a line")


async def _run(options: argparse.Namespace) -> int:
    async with connect(load_site(options)) as coordinator:
        nodes = await coordinator.nodes()
    if options.json:
        for node in nodes:
            print(to_json(node), flush=True)
    elif nodes:
        console().print(node_table(nodes, in_gang=False))
    else:
        print("no node daemon has attached yet", flush=True)
    return 0


COMMAND = Command("nodes", "list nodes and their verdicts", _arguments, _run)
