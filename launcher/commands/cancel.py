"""`muster cancel JOB`: ends a gang and its Slurm jobs."""

from __future__ import annotations

import argparse

from muster.launcher.command import Command, connect, load_site, say
from muster.launcher.coordinator_client import gang_ref


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="a Slurm job id or a gang id")


async def _run(options: argparse.Namespace) -> int:
    async with connect(load_site(options)) as coordinator:
        say(await coordinator.cancel(gang_ref(options.job)))
    return 0


COMMAND = Command(_arguments, _run)
