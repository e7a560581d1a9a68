"""`muster nodes`: lists every node that Slurm has or that a node daemon reports, with its health."""

from __future__ import annotations

import argparse

from muster.launcher.command import Command, connect, load_site, print_note, say, screen, show, time_arguments
from muster.launcher.output.json_text import to_json
from muster.launcher.output.node_tables import node_lines


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help="show what node checks have found, too")
    parser.add_argument("--json", action="store_true", help="print one NodeView (api.proto) on each line")
    time_arguments(parser)


async def _run(options: argparse.Namespace) -> int:
    async with connect(load_site(options)) as coordinator:
        reply = await coordinator.nodes()
    if options.json:
        for node in reply.nodes:
            print(to_json(node), flush=True)
    elif reply.nodes:
        show(node_lines(reply.nodes, screen(options), verbose=options.verbose))
    else:
        say("no nodes to show: no node daemon has attached yet, or others are private here and you have none")
    if reply.private_unknown:
        print_note(f"users see the nodes of their own jobs only: PrivateData is not known: {reply.private_unknown}")
    if reply.slurm_unknown:
        print_note(f"nodes without musterd are not listed: {reply.slurm_unknown}")
    return 0


COMMAND = Command(_arguments, _run)
