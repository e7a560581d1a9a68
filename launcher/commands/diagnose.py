"""`muster diagnose JOB`: is each group where it should be, which link is slow, how fast are steps, and what to change.

It asks the coordinator for what was measured, and Slurm for the network. Nothing is changed. With `--measure`, agents
of the job send to each other, one pair at a time, for half a second each.
"""

from __future__ import annotations

import argparse

from muster.launcher.command import Command, time_arguments


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="a Slurm job id or a gang id")
    words = "measure links between the job's nodes, one at a time, half a second each"
    parser.add_argument("--measure", action="store_true", help=words)
    parser.add_argument(
        "--accelerator",
        metavar="NAME",
        help="GPUs, for the prediction; default: that of the GRES, else H100-SXM",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, in seconds and bytes")
    time_arguments(parser)


async def _run(options: argparse.Namespace) -> int:
    from muster.launcher.diagnosis import show  # only here: other commands need no cost model

    return await show.run(options)


COMMAND = Command(_arguments, _run)
