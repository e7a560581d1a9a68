"""`muster top [JOB]`: a live screen of one job, or of all jobs and nodes.

`--record FILE` writes what comes into a file, too; `--replay FILE` shows that again, without a coordinator.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from datetime import UTC, tzinfo
from pathlib import Path
from typing import TextIO

from muster.launcher.command import Command, connect, load_site, time_arguments
from muster.launcher.coordinator_client import gang_ref
from muster.launcher.errors import EXIT_BUG, LauncherError, WrongInput
from muster.launcher.output.screen import local_zone
from muster.launcher.top.feed import Feed, LiveFeed, Replay
from muster.launcher.top.messages import read_recording
from muster.launcher.top.place import OVERVIEW, Place
from muster.v1.api_pb2 import EventRecord, GangView


def _arguments(parser: argparse.ArgumentParser) -> None:
    words = "a Slurm job id or a gang id; default: all your jobs, and the nodes"
    parser.add_argument("job", metavar="JOB", nargs="?", help=words)
    parser.add_argument("--record", metavar="FILE", type=Path, help="write what comes into a new file, too")
    parser.add_argument("--replay", metavar="FILE", type=Path, help="show a recording; no coordinator is asked")
    parser.add_argument("--speed", metavar="X", type=float, default=1.0, help="of a replay: X times as fast; default 1")
    time_arguments(parser)


async def _run(options: argparse.Namespace) -> int:
    if options.replay is not None:
        return await _replay(options)
    _check_terminal()
    async with connect(load_site(options)) as coordinator:
        where = Place()
        if options.job is not None:
            view = await coordinator.describe(gang_ref(options.job))
            where = Place(OVERVIEW, view.gang_id, only_job=True)
        with contextlib.ExitStack() as stack:
            recording = stack.enter_context(_new_file(options.record)) if options.record is not None else None
            return await show(LiveFeed(coordinator, recording), where, _zone(options))


COMMAND = Command(_arguments, _run)


async def _replay(options: argparse.Namespace) -> int:
    if options.job is not None or options.record is not None:
        raise WrongInput("--replay shows what its file holds: give neither JOB nor --record")
    if not options.speed > 0:
        raise WrongInput(f"--speed {options.speed:g} must be more than 0")
    try:
        with options.replay.open(encoding="utf-8", errors="replace") as lines:
            recorded = read_recording(lines, str(options.replay))
    except OSError as error:
        raise WrongInput(f"{options.replay} can't be read: {error.strerror}") from None
    _check_terminal()
    first = next((one.content for one in recorded if not isinstance(one.content, str)), None)
    where = Place(OVERVIEW, first.gang_id, only_job=True) if isinstance(first, GangView | EventRecord) else Place()
    return await show(Replay(recorded, options.speed), where, _zone(options))


def _zone(options: argparse.Namespace) -> tzinfo:
    return UTC if options.utc else local_zone()


async def show(feed: Feed, where: Place, zone: tzinfo) -> int:
    """Show what the feed brings until the user ends it. Returns the exit status."""
    try:
        from muster.launcher.top.app import Top
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("textual"):
            raise
        raise LauncherError(
            "muster top needs the package textual", "install it with: pip install 'muster[top]'"
        ) from None
    app = Top(feed, where, zone)
    await app.run_async()
    return EXIT_BUG if app.return_code == 1 else app.return_code or 0  # Textual has shown what was wrong


def _check_terminal() -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise WrongInput("muster top needs a terminal", "into a pipe or a file: muster status --follow JOB")


def _new_file(path: Path) -> TextIO:
    try:
        return path.open("x", encoding="utf-8")
    except OSError as error:
        raise WrongInput(f"{path} can't be made: {error.strerror}") from None
