"""`muster plan job.toml`: what the job will cost, before it is queued.

It asks Slurm's controller for the network, if Slurm answers, and needs no coordinator. If there is one, it knows the
NVLink domains and adapters that nodes report. Nothing is queued.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from muster.launcher.command import Command
from muster.launcher.spec.flags import add_options


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", type=Path, metavar="job.toml", help="the job; docs/JOBTOML.md describes it")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in seconds and bytes")
    parser.add_argument("--accelerator", metavar="NAME", help="GPUs; default: that of the GRES, else H100-SXM")
    parser.add_argument("--no-slurm", action="store_true", help="take a usual network, not the one that Slurm has")
    parser.add_argument(
        "--price", type=_positive, metavar="NUMBER", help="the price of a GPU for an hour, in any currency"
    )
    parser.add_argument("--in-network", action="store_true", help="the switches reduce (SHARP, NVLink SHARP)")
    words = "share of the peak that matrix products reach: 0.55"
    parser.add_argument("--efficiency", type=_positive, metavar="SHARE", help=words)
    words = "calibrate the estimate with the measured time of a step"
    parser.add_argument("--measured-step", type=_positive, metavar="SECONDS", help=words)
    parser.add_argument("--node-mtbf", type=_positive, metavar="HOURS", help="mean time between failures of one node")
    parser.add_argument("--repair", type=_positive, metavar="HOURS", help="until a failed node is back")
    words = "from a fault to the next step, without the transfer of the state"
    parser.add_argument("--recovery", type=_positive, metavar="SECONDS", help=words)
    add_options(parser)


async def _run(options: argparse.Namespace) -> int:
    from muster.launcher.plan import show  # only here: other commands need no cost model

    return await show.run(options)


COMMAND = Command(_arguments, _run)
