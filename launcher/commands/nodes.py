"""`muster nodes [NODE]`: lists every node that Slurm has or that a node daemon reports, with its health; or prints the
history of one node, the newest record first.

`--state`, `--signal`, `--leaf` and `--job` choose what is listed, `--sort` its order.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from muster.launcher.command import Command, connect, load_site, print_note, say, screen, show, time_arguments
from muster.launcher.command_line import whole_number
from muster.launcher.coordinator_client import CoordinatorClient, gang_ref
from muster.launcher.output.json_text import to_json
from muster.launcher.output.node_tables import SORTS, NodeFilter, history_lines, node_lines
from muster.node_health import NodeHealth
from muster.v1.api_pb2 import NodeHistoryReply, NodesReply
from muster.wording import counted

_ONE_ANSWER = 200
"""Records of a node's history that one answer has, at most."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "node", metavar="NODE", nargs="?", help="print the history of this node; default: list all nodes"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show what node checks have found, and what drivers said, too"
    )
    parser.add_argument(
        "--state", type=str.upper, choices=(*NodeHealth, "UNHEARD"), action="append", metavar="STATE",
        help="nodes with this verdict; may be given several times",
    )  # fmt: skip
    parser.add_argument("--signal", metavar="WORDS", help="nodes on which a signal with these words holds, or did it")
    parser.add_argument("--leaf", metavar="LEAF", help="nodes on this leaf switch")
    parser.add_argument("--job", type=int, metavar="JOB", help="nodes that this job holds, those of its pool jobs, too")
    parser.add_argument(
        "--sort", choices=SORTS, metavar="|".join(SORTS), default="node", help="the order; default: node"
    )
    words = "with NODE: so many records; default: 50"
    parser.add_argument("--limit", type=whole_number, default=50, metavar="N", help=words)
    words = "with NODE: only records before this position"
    parser.add_argument("--before", type=whole_number, default=0, metavar="POSITION", help=words)
    parser.add_argument(
        "--json", action="store_true", help="print one NodeView (api.proto) on each line; with NODE: one EventRecord"
    )
    time_arguments(parser)


async def _run(options: argparse.Namespace) -> int:
    async with connect(load_site(options)) as coordinator:
        if options.node is not None:
            return await _history(coordinator, options)
        reply = await coordinator.nodes()
        jobs: Sequence[int] = ()
        if options.job is not None:  # refused if there is no such job
            jobs = (await coordinator.describe(gang_ref(str(options.job)))).slurm_job_ids
    _list(reply, options, jobs)
    if reply.private_unknown:
        print_note(f"users see the nodes of their own jobs only: PrivateData is not known: {reply.private_unknown}")
    if reply.slurm_unknown:
        print_note(f"nodes without musterd are not listed: {reply.slurm_unknown}")
    return 0


COMMAND = Command(_arguments, _run)


def _list(reply: NodesReply, options: argparse.Namespace, jobs: Sequence[int]) -> None:
    chosen = NodeFilter(options.state or (), options.signal or "", options.leaf or "", jobs)
    nodes = sorted(filter(chosen.includes, reply.nodes), key=SORTS[options.sort])
    if options.json:
        for node in nodes:
            print(to_json(node), flush=True)
    elif nodes:
        show(node_lines(nodes, screen(options), verbose=options.verbose))
    elif reply.nodes:
        say(f"{counted(len(reply.nodes), 'node is', 'nodes are')} known, and none is as asked for")
    else:
        say("no nodes to show: no node daemon has attached yet, or others are private here and you have none")


async def _history(coordinator: CoordinatorClient, options: argparse.Namespace) -> int:
    """Prints the newest records, as many as asked for."""
    found = NodeHistoryReply(before=options.before)
    while len(found.records) < options.limit:
        wanted = min(options.limit - len(found.records), _ONE_ANSWER)
        found.MergeFrom(page := await coordinator.node_history(options.node, found.before, wanted))
        found.before = page.before
        if not page.before:
            break
    if options.json:
        for record in found.records:
            print(to_json(record), flush=True)
    else:
        show(history_lines(found, screen(options)))
    if found.before:
        print_note(f"there may be older records: --before {found.before}")
    return 0
