"""`muster cancel JOB`: ends a gang and its Slurm jobs."""

from __future__ import annotations

import argparse

from muster.daemon.host.plain_text import plain
from muster.launcher.command import Command, connect, load_site
from muster.launcher.coordinator_client import gang_ref


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="a Slurm job id or a gang id")


async def _run(options: argparse.Namespace) -> int:
    async with connect(load_site(options)) as coordinator:
        print(plain(await coordinator.cancel(gang_ref(options.job))), flush=True)
    return 0


COMMAND = Command(_arguments, _run)
