"""`muster logs [-f] [--rank R] [--generation G] [--stacks] JOB`: prints the output of ranks from the run folder.

Agents write one file for each rank and generation (`RUN_DIR/logs/GANG/gG/rankR.log`). This command reads only these
files and sends nothing to the nodes. With `--stacks` it prints the stacks of ranks that hung (`rankR.stacks`). If
several ranks are printed, each line has a prefix. `--follow` continues with the next generations, and ends with the
job.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from muster.daemon.host import rank_log_files
from muster.launcher.command import Command, connect, load_site, note_coordinator_unavailable, print_note
from muster.launcher.coordinator_client import CoordinatorClient, gang_ref
from muster.launcher.errors import WrongInput
from muster.launcher.output.rank_logs import RankLogReader, generations
from muster.v1.api_pb2 import GangView

POLL_S = 0.2
"""Seconds between two reads of the log files with --follow."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="a Slurm job id or a gang id")
    parser.add_argument("-f", "--follow", action="store_true", help="print new output until the job ends")
    parser.add_argument("--rank", type=int, metavar="R", help="only this rank; default: all ranks")
    parser.add_argument("--generation", type=int, metavar="G", help="only this generation; default: the newest one")
    parser.add_argument(
        "--stacks", action="store_true", help="the stacks of ranks that hung; default: of all generations"
    )
    parser.add_argument("--all", action="store_true", help="all generations from the first one on")


async def _run(options: argparse.Namespace) -> int:
    async with connect(load_site(options)) as coordinator:
        view = await coordinator.describe(gang_ref(options.job))
        reader = RankLogReader(
            _folder(view), options.rank, _first_generation(options, view), options.generation, stacks=options.stacks
        )
        found = _copy(reader, to_end=not options.follow)
        if options.follow:
            if not found and not view.final:
                print_note(f"muster: nothing is written yet: {_state(view)}")
            view, found_later = await _follow(coordinator, view, reader)
            found = found or found_later
        if not found:
            raise _no_logs_error(options, view)
    return 0


COMMAND = Command(_arguments, _run)


def _folder(view: GangView) -> Path:
    return rank_log_files.log_folder(view.run_dir, view.gang_id)


def _first_generation(options: argparse.Namespace, view: GangView) -> int:
    if options.generation is not None:
        return int(options.generation)
    return 0 if options.all or options.stacks else max(generations(_folder(view)), default=0)


def _copy(reader: RankLogReader, *, to_end: bool = False) -> bool:
    """Prints all new lines. Returns whether there were any."""
    found = False
    for line in reader.lines(to_end=to_end):
        found = True
        sys.stdout.write(line)
    sys.stdout.flush()
    return found


async def _follow(coordinator: CoordinatorClient, view: GangView, reader: RankLogReader) -> tuple[GangView, bool]:
    """Prints new lines until the gang is final. Returns its last view, and whether there was a line."""
    ended, found = asyncio.ensure_future(_until_final(coordinator, view)), False
    while not ended.done():
        await asyncio.wait([ended], timeout=POLL_S)
        found = _copy(reader) or found
    return ended.result(), _copy(reader, to_end=True) or found


async def _until_final(coordinator: CoordinatorClient, view: GangView) -> GangView:
    """Returns the last view when the gang is final. An unavailable coordinator does not end the wait."""
    async for latest in coordinator.follow(gang_ref(view.gang_id), note_coordinator_unavailable):
        view = latest
        if latest.final:
            break
    return view


def _no_logs_error(options: argparse.Namespace, view: GangView) -> WrongInput:
    folder = _folder(view)
    known = generations(folder)
    if not known and not view.generation:
        return WrongInput(f"no rank has written anything: {_state(view)}", f"muster status {options.job} says more")
    kind = "stacks" if options.stacks else "logs"
    what = "" if options.rank is None else f" of rank {options.rank}"
    what += "" if options.generation is None else f" in generation {options.generation}"
    if not known:
        return WrongInput(f"there are no {kind}{what} under {folder}", "this host must see that folder")
    return WrongInput(
        f"there are no {kind}{what} under {folder}", f"generations with logs: {', '.join(map(str, known))}"
    )


def _state(view: GangView) -> str:
    if view.final:
        return f"the job is {view.phase}: {view.reason}"
    return f"the job is {view.phase}" + (f", and waits for {view.waiting_for}" if view.waiting_for else "")
