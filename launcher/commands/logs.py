"""`muster logs [-f] [--rank R] [--node NODE] [--generation G] [--tail N] [--grep WORDS] [--stacks] JOB`: prints the
output of ranks from the run folder.

Agents write one file for each rank and generation (`RUN_DIR/logs/GANG/gG/rankR.log`). This command reads only these
files and sends nothing to the nodes. With `--stacks` it prints the stacks of ranks that hung (`rankR.stacks`). If
several ranks are printed, each line has a prefix. `--follow` continues with the next generations, and ends with the
job. The coordinator says where the run folder is; `--run-dir` does without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from muster.daemon.host import rank_log_files
from muster.daemon.transport.gang_ids import name_of
from muster.launcher.command import Command, connect, load_site, note_coordinator_unavailable, print_note
from muster.launcher.command_line import whole_number
from muster.launcher.coordinator_client import CoordinatorClient, gang_ref
from muster.launcher.errors import Unavailable, WrongInput
from muster.launcher.output.rank_logs import RankLogReader, Wanted, generations
from muster.v1.api_pb2 import EventsRequest, GangView
from muster.wording import listed

_WITHOUT = "the logs are files in the job's run_dir, which can be read without the coordinator"
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
    parser.add_argument("--node", metavar="NODE", help="only the ranks of this node; of one that left: its last ones")
    lines = partial(whole_number, least=1)
    parser.add_argument("--tail", type=lines, metavar="N", help="only the last N lines of each rank")
    parser.add_argument("--grep", default="", metavar="WORDS", help="only lines with these words, whatever their case")
    words = "read the logs in this run folder, without the coordinator; JOB may be a job's name, too"
    parser.add_argument("--run-dir", metavar="DIR", help=words)


async def _run(options: argparse.Namespace) -> int:
    if options.run_dir is not None:
        return await _read_alone(options)
    try:
        async with connect(load_site(options)) as coordinator:
            return await _read(coordinator, options)
    except Unavailable as error:
        raise Unavailable(error.message, f"{_WITHOUT}: muster logs --run-dir DIR {options.job}") from None


async def _read(coordinator: CoordinatorClient, options: argparse.Namespace) -> int:
    view = await coordinator.describe(gang_ref(options.job))
    wanted = _wanted(options, view)
    if options.node is not None:
        wanted = _of_node(wanted, options.node, await _seatings(coordinator, view), view)
    reader = RankLogReader(_folder(view), wanted)
    found = _copy(reader, to_end=not options.follow)
    if options.follow:
        if not found and not view.final:
            print_note(f"muster: nothing is written yet: {_state(view)}")
        view, found_later = await _follow(coordinator, view, reader)
        found = found or found_later
    if not found:
        raise _no_logs_error(options, view)
    return 0


async def _read_alone(options: argparse.Namespace) -> int:
    """Reads the files without a coordinator. Nobody says when the job ends: --follow ends with Ctrl+C."""
    if options.node is not None:
        raise WrongInput("--node needs the coordinator, which knows the ranks of a node", "give --rank with --run-dir")
    view = GangView(gang_id=_gang_in(options.run_dir, options.job), run_dir=options.run_dir)
    reader = RankLogReader(_folder(view), _wanted(options, view))
    found = _copy(reader, to_end=not options.follow)
    while options.follow:
        await asyncio.sleep(POLL_S)
        _copy(reader)
    if not found:
        raise _no_logs_error(options, view)
    return 0


def _gang_in(run_dir: str, job: str) -> str:
    """The gang that has its logs in a run folder: the one of this id, the newest one of this Slurm job or of this name,
    else the only one."""
    gangs = rank_log_files.gangs_with_logs(run_dir)
    if job in gangs:
        return job
    if job.isdecimal() and (of_job := [gang for gang in gangs if rank_log_files.is_of_job(run_dir, gang, job)]):
        return of_job[0]
    if of_name := [gang for gang in gangs if name_of(gang) == job]:
        if len(of_name) > 1:
            print_note(f"muster: these are the logs of gang {of_name[0]}, the newest of {len(of_name)} with this name")
        return of_name[0]
    if len(gangs) == 1:
        print_note(f"muster: these are the logs of gang {gangs[0]}: there are no others in {run_dir}")
        return gangs[0]
    known = f"{run_dir} has logs of {listed(gangs, ', ')}" if gangs else f"{run_dir} has no logs that you may read"
    raise WrongInput(f"{job!r} is no gang id, Slurm job id or name of a job with logs in this folder", known)


def _wanted(options: argparse.Namespace, view: GangView) -> Wanted:
    ranks = None if options.rank is None else {options.rank}
    first = _first_generation(options, view)
    return Wanted(ranks, first, options.generation, options.tail, options.grep, stacks=options.stacks)


async def _seatings(coordinator: CoordinatorClient, view: GangView) -> dict[int, dict[str, set[int]]]:
    """The ranks of each node in each generation, the newest one last."""
    each, found = 1, dict[int, dict[str, set[int]]]()
    async for record in coordinator.events(EventsRequest(gang=gang_ref(view.gang_id))):
        if record.name == "GangRegistered":
            each = json.loads(record.json)["spec"]["ranks_per_node"]
        elif record.name == "GenerationStarted":
            fact = json.loads(record.json)
            firsts = {seat["node"]: seat["group_rank"] * each for seat in fact["seats"]}
            found[fact["generation"]] = {node: {*range(first, first + each)} for node, first in firsts.items()}
    return found


def _of_node(wanted: Wanted, node: str, seatings: Mapping[int, Mapping[str, set[int]]], view: GangView) -> Wanted:
    """Of these, the lines of the ranks of one node. Of a node that has left, those of its last generation.

    Raises:
        WrongInput: it had none.
    """
    asked = seatings if wanted.only is None else {wanted.only: seatings.get(wanted.only, {})}
    carried = [generation for generation, seats in asked.items() if node in seats]
    if not carried:
        carriers = listed(sorted({rank.node for rank in view.ranks}))
        when = "" if wanted.only is None else f" in generation {wanted.only}"
        hint = f"its ranks are on {carriers}" if carriers else "it has no ranks now"
        raise WrongInput(f"{node} has carried no rank of the job{when}", hint)
    last = carried[-1]
    ranks = {rank for rank in asked[last][node] if wanted.ranks is None or rank in wanted.ranks}
    if wanted.first > last:  # it has left: what others wrote later as these ranks is not its own
        return replace(wanted, ranks=ranks, first=last, only=last)
    return replace(wanted, ranks=ranks)


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
    if not known and not view.generation and not options.run_dir:
        return WrongInput(f"no rank has written anything: {_state(view)}", f"muster status {options.job} says more")
    kind = "stacks" if options.stacks else "logs"
    what = "" if options.rank is None else f" of rank {options.rank}"
    what += "" if options.generation is None else f" in generation {options.generation}"
    what += f" with {options.grep!r}" if options.grep else ""
    if not known:
        return WrongInput(f"there are no {kind}{what} under {folder}", "this host must see that folder")
    return WrongInput(
        f"there are no {kind}{what} under {folder}", f"generations with logs: {', '.join(map(str, known))}"
    )


def _state(view: GangView) -> str:
    if view.final:
        return f"the job is {view.phase}: {view.reason}"
    return f"the job is {view.phase}" + (f", and waits for {view.waiting_for}" if view.waiting_for else "")
