"""`muster status [JOB]`: prints one gang in detail, or one line for each of the caller's gangs that go on, or ended
within a day. `--all` prints those, too, that have ended before, for as long as the coordinator knows them.

`--follow` prints the gang again after each change, and exits with the gang's exit code when the gang ends. With
`--json` it prints one GangView (api.proto) on each line.
"""

from __future__ import annotations

import argparse
import sys

from muster.daemon.host import clock
from muster.launcher.command import (
    Command,
    connect,
    load_site,
    note_coordinator_unavailable,
    print_note,
    say,
    screen,
    show,
    time_arguments,
)
from muster.launcher.coordinator_client import CoordinatorClient, gang_ref
from muster.launcher.output.json_text import to_json
from muster.launcher.output.tables import gang_details, gang_list, recent
from muster.v1.api_pb2 import GangView


def _arguments(parser: argparse.ArgumentParser) -> None:
    words = "a Slurm job id or a gang id; default: your jobs that go on, or ended within a day"
    parser.add_argument("job", metavar="JOB", nargs="?", help=words)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="update until the job ends; exit with the job's exit code"
    )
    parser.add_argument(
        "-a", "--all", action="store_true", help="without JOB: jobs, too, that ended more than a day ago"
    )
    parser.add_argument("--json", action="store_true", help="print one GangView (api.proto) on each line, of all jobs")
    time_arguments(parser)


async def _run(options: argparse.Namespace) -> int:
    async with connect(load_site(options)) as coordinator:
        if options.job is None:
            return await _list(coordinator, options)
        if not options.follow:
            _show(await coordinator.describe(gang_ref(options.job)), options)
            return 0
        return await _follow(coordinator, options)


COMMAND = Command(_arguments, _run)


async def _list(coordinator: CoordinatorClient, options: argparse.Namespace) -> int:
    gangs = await coordinator.gangs()
    if options.json:
        for gang in gangs:
            print(to_json(gang), flush=True)
        return 0
    shown = gangs if options.all else recent(gangs, clock.wall())
    if shown:
        show(gang_list(shown, screen(options)))
    elif not gangs:
        say("the coordinator knows no jobs of yours")
    if left_out := len(gangs) - len(shown):
        print_note(f"jobs that ended more than a day ago are not shown: {left_out} (--all shows them)")
    return 0


def _show(view: GangView, options: argparse.Namespace) -> None:
    if options.json:
        print(to_json(view), flush=True)
    else:
        show(gang_details(view, screen(options)))


async def _follow(coordinator: CoordinatorClient, options: argparse.Namespace) -> int:
    view, ref = GangView(), gang_ref(options.job)
    if options.json or not sys.stdout.isatty():
        async for view in coordinator.follow(ref, note_coordinator_unavailable):
            _show(view, options)
        return exit_code(view)
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False, vertical_overflow="visible") as live:
        async for view in coordinator.follow(ref, note_coordinator_unavailable):
            lines = gang_details(view, screen(options))  # the terminal may have another width by now
            live.update(Text.from_ansi("\n".join(lines)), refresh=True)
    return exit_code(view)


def exit_code(view: GangView) -> int:
    """The gang's exit code as a shell reports it: 128 plus the signal's number if a signal ended the job."""
    return view.exit_code if view.exit_code >= 0 else 128 - view.exit_code
