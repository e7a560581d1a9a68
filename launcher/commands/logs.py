"""`muster logs [-f] [--rank R] [--generation G] [--stacks] JOB`: what the ranks wrote, read from the run folder.

Agents write one file for each rank and generation (`RUN_DIR/logs/GANG/gG/rankR.log`); nothing is asked of the nodes.
With `--stacks` it is what ranks were doing when they hung (`rankR.stacks`). Several ranks are told apart by a prefix.
Following goes on into the next generation, and ends with the job.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from muster.daemon.host import rank_log_files
from muster.launcher.command import Command, connect, load_site, say_away
from muster.launcher.coordinator import Coordinator, gang_ref
from muster.launcher.errors import WrongInput
from muster.launcher.output.rank_logs import Reader, generations
from muster.v1.api_pb2 import GangView

POLL_S = 0.2


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="its Slurm job id, or its gang id")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what is written, until the job ends")
    parser.add_argument("--rank", type=int, metavar="R", help="this rank alone; default: all")
    parser.add_argument("--generation", type=int, metavar="G", help="this generation alone; default: the newest")
    parser.add_argument("--stacks", action="store_true", help="what ranks that hung were doing; default: of all such")
    parser.add_argument("--all", action="store_true", help="every generation from the first on")


async def _run(options: argparse.Namespace) -> int:
    async with connect(load_site(options)) as coordinator:
        view = await coordinator.describe(gang_ref(options.job))
        reader = Reader(_folder(view), options.rank, _first(options, view), options.generation, stacks=options.stacks)
        found = _copy(reader, to_end=not options.follow)
        if options.follow:
            await _follow(coordinator, view, reader)
        elif not found:
            raise _nothing(options, view)
    return 0


COMMAND = Command("logs", "show what a job's ranks wrote", _arguments, _run)


def _folder(view: GangView) -> Path:
    return rank_log_files.log_folder(view.run_dir, view.gang_id)


def _first(options: argparse.Namespace, view: GangView) -> int:
    if options.generation is not None:
        return int(options.generation)
    return 0 if options.all or options.stacks else max(generations(_folder(view)), default=0)


def _copy(reader: Reader, *, to_end: bool = False) -> bool:
    """Everything new; whether there was anything."""
    found = False
    for line in reader.lines(to_end=to_end):
        found = True
        sys.stdout.write(line)
    sys.stdout.flush()
    return found


async def _follow(coordinator: Coordinator, view: GangView, reader: Reader) -> None:
    ended = asyncio.ensure_future(_end(coordinator, view))
    while not ended.done():
        await asyncio.wait([ended], timeout=POLL_S)
        _copy(reader)
    _copy(reader, to_end=True)
    ended.result()


async def _end(coordinator: Coordinator, view: GangView) -> None:
    """Returns when the gang is final. A coordinator that is away for a while ends nothing."""
    async for latest in coordinator.follow(gang_ref(view.gang_id), say_away):
        if latest.final:
            return


def _nothing(options: argparse.Namespace, view: GangView) -> WrongInput:
    kind = "stacks" if options.stacks else "logs"
    what = "" if options.rank is None else f" of rank {options.rank}"
    what += "" if options.generation is None else f" in generation {options.generation}"
    known = ", ".join(map(str, generations(_folder(view))))
    hint = f"generations with logs: {known}" if known else f"the job is {view.phase}; see muster status {options.job}"
    return WrongInput(f"there are no {kind}{what} under {_folder(view)} (must be seen from this host)", hint)
