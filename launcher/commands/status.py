"""`muster status [JOB]`: one gang whole, or a line for each of the caller's gangs.

`--follow` redraws whenever something changes and ends with the gang, with its exit code; with `--json` it writes one
GangView (api.proto) a line.
"""

from __future__ import annotations

import argparse
import sys

from rich.live import Live

from muster.launcher.command import Command, connect, console, load_site, say_away
from muster.launcher.coordinator import Coordinator, gang_ref
from muster.launcher.output.json_text import to_json
from muster.launcher.output.tables import gang_list, gang_text
from muster.v1.api_pb2 import GangView


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", nargs="?", help="its Slurm job id, or its gang id; none: all yours")
    parser.add_argument("-f", "--follow", action="store_true", help="until the job ends; exits with its exit code")
    parser.add_argument("--json", action="store_true", help="one GangView (api.proto) a line")


async def _run(options: argparse.Namespace) -> int:
    async with connect(load_site(options)) as coordinator:
        if options.job is None:
            return await _list(coordinator, as_json=options.json)
        if not options.follow:
            _show(await coordinator.describe(gang_ref(options.job)), as_json=options.json)
            return 0
        return await _follow(coordinator, options.job, as_json=options.json)


COMMAND = Command("status", "show how a job stands", _arguments, _run)


async def _list(coordinator: Coordinator, *, as_json: bool) -> int:
    gangs = await coordinator.gangs()
    if as_json:
        for gang in gangs:
            print(to_json(gang), flush=True)
    elif gangs:
        console().print(gang_list(gangs))
    else:
        print("no jobs of yours are known here", flush=True)
    return 0


def _show(view: GangView, *, as_json: bool) -> None:
    if as_json:
        print(to_json(view), flush=True)
    else:
        console().print(gang_text(view))


async def _follow(coordinator: Coordinator, job: str, *, as_json: bool) -> int:
    view = GangView()
    if as_json or not sys.stdout.isatty():
        async for view in coordinator.follow(gang_ref(job), say_away):
            _show(view, as_json=as_json)
        return exit_code(view)
    with Live(console=console(), auto_refresh=False, vertical_overflow="visible") as live:
        async for view in coordinator.follow(gang_ref(job), say_away):
            live.update(gang_text(view), refresh=True)
    return exit_code(view)


def exit_code(view: GangView) -> int:
    """The gang's exit code as a shell has it: a signal's number over 128."""
    return view.exit_code if view.exit_code >= 0 else 128 - view.exit_code
