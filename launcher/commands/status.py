"""`muster status [JOB]`: prints one gang in detail, or one line for each of the caller's gangs.

`--follow` prints the gang again after each change, and exits with the gang's exit code when the gang ends. With
`--json` it prints one GangView (api.proto) on each line.
"""

from __future__ import annotations

import argparse
import sys

from muster.launcher.command import Command, connect, console, load_site, note_coordinator_unavailable
from muster.launcher.coordinator_client import CoordinatorClient, gang_ref
from muster.launcher.output.json_text import to_json
from muster.launcher.output.tables import gang_details, gang_list
from muster.v1.api_pb2 import GangView


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", nargs="?", help="a Slurm job id or a gang id; default: all your jobs")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="update until the job ends; exit with the job's exit code"
    )
    parser.add_argument("--json", action="store_true", help="print one GangView (api.proto) on each line")


async def _run(options: argparse.Namespace) -> int:
    async with connect(load_site(options)) as coordinator:
        if options.job is None:
            return await _list(coordinator, as_json=options.json)
        if not options.follow:
            _show(await coordinator.describe(gang_ref(options.job)), as_json=options.json)
            return 0
        return await _follow(coordinator, options.job, as_json=options.json)


COMMAND = Command(_arguments, _run)


async def _list(coordinator: CoordinatorClient, *, as_json: bool) -> int:
    gangs = await coordinator.gangs()
    if as_json:
        for gang in gangs:
            print(to_json(gang), flush=True)
    elif gangs:
        console().print(gang_list(gangs))
    else:
        print("the coordinator knows no jobs of yours", flush=True)
    return 0


def _show(view: GangView, *, as_json: bool) -> None:
    if as_json:
        print(to_json(view), flush=True)
    else:
        console().print(gang_details(view))


async def _follow(coordinator: CoordinatorClient, job: str, *, as_json: bool) -> int:
    view = GangView()
    if as_json or not sys.stdout.isatty():
        async for view in coordinator.follow(gang_ref(job), note_coordinator_unavailable):
            _show(view, as_json=as_json)
        return exit_code(view)
    from rich.live import Live

    with Live(console=console(), auto_refresh=False, vertical_overflow="visible") as live:
        async for view in coordinator.follow(gang_ref(job), note_coordinator_unavailable):
            live.update(gang_details(view), refresh=True)
    return exit_code(view)


def exit_code(view: GangView) -> int:
    """The gang's exit code as a shell reports it: 128 plus the signal's number if a signal ended the job."""
    return view.exit_code if view.exit_code >= 0 else 128 - view.exit_code
