"""`muster check NODES`: checks nodes in a short Slurm job of their own, and pairs of them.

The exit status is 0 if all nodes have passed and no node and no link is slow, otherwise 1. It needs no coordinator.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from muster.daemon.preflight.check_result import CheckResult, Outcome
from muster.daemon.preflight.pairing import PairRate, localise
from muster.launcher.command import Command, say, screen, show
from muster.launcher.commands.check_steps import CheckOptions, check_nodes
from muster.launcher.errors import EXIT_FAILED, WrongInput
from muster.launcher.output.check_tables import check_table, counter_lines, pair_lines
from muster.slurm.client.parsing.hostlist import expand
from muster.wording import counted

MAX_NODES = 64
"""Nodes of one call. A fleet that checks itself at once trains nothing meanwhile, and loads PyTorch from one file
system."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("nodes", metavar="NODES", help='names as Slurm writes them: "n[1-8],n12"')
    parser.add_argument("--partition", metavar="NAME", default="", help="Slurm's partition for the job")
    parser.add_argument(
        "--python", metavar="PATH", default=sys.executable, help="an interpreter with PyTorch; default: this one"
    )
    parser.add_argument("--no-pairs", action="store_true", help="check each node, and no pairs of nodes")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each node and each pair")


async def _run(options: argparse.Namespace) -> int:
    nodes = _expand(options.nodes)
    found = await check_nodes(nodes, CheckOptions(options.python, options.partition, pairs=not options.no_pairs))
    _print(found.results, found.pairs, options.json)
    slow = localise(found.pairs)
    passed = all(result.outcome is Outcome.PASSED for result in found.results.values())
    good = passed and not slow.nodes and not slow.links
    return 0 if good else EXIT_FAILED


COMMAND = Command(_arguments, _run, remote=False)


def _expand(text: str) -> Sequence[str]:
    try:
        nodes = list(dict.fromkeys(expand(text)))
    except ValueError as error:
        raise WrongInput(str(error)) from None
    if not 1 <= len(nodes) <= MAX_NODES:
        raise WrongInput(
            f"{counted(len(nodes), 'node')}: a check takes 1 to {MAX_NODES}", "check the others in another call"
        )
    return nodes


def _print(results: dict[str, CheckResult], pairs: Sequence[PairRate], as_json: bool) -> None:
    if as_json:
        for node, result in results.items():
            print(json.dumps({"node": node, **json.loads(result.to_json())}))
        for pair in pairs:
            print(json.dumps(dataclasses.asdict(pair)))
    else:
        show(check_table(results, screen()))
        for line in (*counter_lines(results), *pair_lines(pairs)):
            say(line)
    sys.stdout.flush()
