"""`muster drain NODE --reason TEXT`: Slurm starts nothing more on a node, and the ranks on it leave it for spares.

Operators use it in place of `scontrol update State=DRAIN`, after which running jobs stay. `scontrol update
State=RESUME` ends a drain of either kind.
"""

from __future__ import annotations

import argparse

from muster.launcher.command import Command, connect, load_site, say


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE", help="a node of the cluster")
    parser.add_argument("--reason", metavar="TEXT", required=True, help="why; Slurm shows it")


async def _run(options: argparse.Namespace) -> int:
    async with connect(load_site(options)) as coordinator:
        reply = await coordinator.drain(options.node, options.reason)
    for line in (reply.text, *reply.jobs):
        say(line)
    return 0


COMMAND = Command(_arguments, _run)
