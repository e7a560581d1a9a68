"""`muster status [JOB]`: prints one job on one screen, or one line for each of the caller's jobs that go on, or ended
within a day. `--full` prints all tables of a job; into a pipe, they are printed always.

Without JOB, `--state`, `--name`, `--user` and `--since` choose what is listed. `--all` lists all jobs that the
coordinator knows.

`--follow` prints the job again after each change, and exits with the job's exit code when the job ends. With
`--json` it prints one GangView (api.proto) on each line.
"""

from __future__ import annotations

import argparse
import os
import pwd
import sys
from collections.abc import Iterable, Iterator, Mapping

from muster import exit_codes
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
from muster.launcher.command_line import since
from muster.launcher.coordinator_client import CoordinatorClient, gang_ref
from muster.launcher.errors import WrongInput
from muster.launcher.output.job_lines import by_number
from muster.launcher.output.job_list import RECENT_S, Selection, gang_list
from muster.launcher.output.job_screen import one_screen
from muster.launcher.output.json_text import to_json
from muster.launcher.output.last_words import last_words
from muster.launcher.output.tables import gang_details
from muster.v1.api_pb2 import GangView
from muster.wording import duration

STATES = (
    "SUBMITTED", "GATHERING", "PREFLIGHT", "STARTING", "RUNNING", "RECOVERING", "DRAINING", "REQUEUED", "DONE",
    "FAILED", "CANCELLED",
)  # fmt: skip
"""The phases of a job, as in docs/STATES.md."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    words = "a Slurm job id or a gang id; default: your jobs that go on, or ended within a day"
    parser.add_argument("job", metavar="JOB", nargs="?", help=words)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="update until the job ends; exit with the job's exit code"
    )
    parser.add_argument("--full", action="store_true", help="with JOB: tables of nodes, ranks and recoveries, too")
    parser.add_argument(
        "-a", "--all", action="store_true", help="without JOB: jobs, too, that ended more than a day ago"
    )
    parser.add_argument(
        "--since", type=since, metavar="7d",
        help="without JOB: jobs that go on, or have ended within this time or since this date (2026-11-20)",
    )  # fmt: skip
    parser.add_argument(
        "--state", type=str.upper, choices=STATES, action="append", metavar="STATE",
        help="without JOB: jobs in this state; may be given several times",
    )  # fmt: skip
    words = "without JOB: jobs of this name; * stands for any characters, ? for one"
    parser.add_argument("--name", default="", metavar="PATTERN", help=words)
    parser.add_argument("--user", metavar="NAME", help="without JOB: jobs of this user (operators)")
    parser.add_argument("--json", action="store_true", help="print one GangView (api.proto) on each line, of all jobs")
    time_arguments(parser)


async def _run(options: argparse.Namespace) -> int:
    async with connect(load_site(options)) as coordinator:
        if options.job is None:
            return await _list(coordinator, options)
        if not options.follow:
            if tasks := await coordinator.tasks(gang_ref(options.job), brief=not options.json):
                _show_list(tasks, options)
                one = min(tasks, key=by_number).array_task
                print_note(f"tasks that have launched nothing are not shown; muster status {one} shows one in full")
                return 0
            await _show(await coordinator.describe(gang_ref(options.job)), options)
            return 0
        return await _follow(coordinator, options)


COMMAND = Command(_arguments, _run)


async def _list(coordinator: CoordinatorClient, options: argparse.Namespace) -> int:
    chosen = _selection(options)
    gangs = await coordinator.gangs(brief=not options.json)
    shown = [view for view in gangs if chosen.includes(view, clock.wall())]
    if shown:
        _show_list(shown, options)
    elif not gangs and not options.json:
        say("the coordinator knows no jobs of yours")
    if not options.json:
        _note_left_out(len(gangs) - len(shown), options)
    return 0


def _show_list(views: Iterable[GangView], options: argparse.Namespace) -> None:
    """One line for each job."""
    views = list(views)
    if options.json:
        for view in views:
            print(to_json(view), flush=True)
    else:
        show(gang_list(views, screen(options), _owners(views)))


def _selection(options: argparse.Namespace) -> Selection:
    """Without a word about time, JSON has all jobs, and the list has those of a day."""
    everything = options.all or (options.json and options.since is None)
    within_s = None if everything else options.since or RECENT_S
    return Selection(within_s, options.state or (), options.name, _uid(options.user) if options.user else None)


def _uid(name: str) -> int:
    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except KeyError:
        raise WrongInput(f"this host knows no user {name!r}", "give a login name or a uid") from None


def _owners(views: Iterable[GangView]) -> Mapping[int, str]:
    """Uid → login name; empty if all jobs are the caller's own."""
    uids = {view.owner_uid for view in views}
    return {} if uids == {os.getuid()} else {uid: _login_name(uid) for uid in uids}


def _login_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _note_left_out(count: int, options: argparse.Namespace) -> None:
    if not count:
        return
    if options.state or options.name or options.user:
        print_note(f"jobs that are not as asked for, or ended too long ago, are not shown: {count}")
    else:
        when = "a day" if options.since is None else duration(options.since)
        print_note(f"jobs that ended more than {when} ago are not shown: {count} (--all shows them)")


async def _show(view: GangView, options: argparse.Namespace) -> None:
    if options.json:
        print(to_json(view), flush=True)
    else:
        show(await _lines(view, options))


async def _lines(view: GangView, options: argparse.Namespace) -> Iterator[str]:
    target, last = screen(options), await last_words(view)  # the terminal may have another width by now
    if options.full or target.width is None:
        return gang_details(view, target, last)
    return one_screen(view, target, clock.wall(), last)


async def _follow(coordinator: CoordinatorClient, options: argparse.Namespace) -> int:
    view, ref = GangView(), gang_ref(options.job)
    if options.json or not sys.stdout.isatty():
        async for view in coordinator.follow(ref, note_coordinator_unavailable):
            await _show(view, options)
        return exit_codes.of_shell(view.exit_code)
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False, vertical_overflow="visible") as live:
        async for view in coordinator.follow(ref, note_coordinator_unavailable):
            live.update(Text.from_ansi("\n".join(await _lines(view, options))), refresh=True)
    return exit_codes.of_shell(view.exit_code)
