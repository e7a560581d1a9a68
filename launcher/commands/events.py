"""`muster events [-f] [JOB]`: prints the coordinator's journal, one event on each line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from muster.daemon.host import clock
from muster.daemon.host.plain_text import plain
from muster.launcher.command import (
    Command,
    connect,
    load_site,
    note_coordinator_unavailable,
    screen,
    show,
    time_arguments,
)
from muster.launcher.command_line import since, whole_number
from muster.launcher.coordinator_client import gang_ref
from muster.launcher.output.json_text import to_json
from muster.launcher.output.screen import Screen
from muster.v1.api_pb2 import EventRecord, EventsRequest


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job", metavar="JOB", nargs="?", help="a Slurm job id or a gang id; default: all jobs (operators only)"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="print new events until the job ends")
    parser.add_argument(
        "--after", type=whole_number, default=0, metavar="POSITION", help="print only the events after this position"
    )
    words = "print only the events of this time, or from this date on (2026-11-20)"
    parser.add_argument("--since", type=since, metavar="7d", help=words)
    parser.add_argument("--json", action="store_true", help="print one EventRecord (api.proto) on each line")
    time_arguments(parser)


async def _run(options: argparse.Namespace) -> int:
    request = EventsRequest(follow=options.follow, after=options.after)
    if options.job is not None:
        request.gang.CopyFrom(gang_ref(options.job))
    async with connect(load_site(options)) as coordinator:
        follow = (
            coordinator.follow_events(request, note_coordinator_unavailable)
            if options.follow
            else coordinator.events(request)
        )
        target, is_first = screen(options), True
        from_s = clock.wall() - options.since if options.since is not None else 0.0
        async for record in follow:
            if record.at_s < from_s and not record.sentinel:
                continue
            if options.json:
                print(to_json(record), flush=True)
            elif not record.sentinel:
                show(event_lines(record, target, heading=is_first))
                is_first = False
    return 0


COMMAND = Command(_arguments, _run)


def event_lines(record: EventRecord, target: Screen, *, heading: bool = False) -> Iterator[str]:
    """One event for the user: the time in milliseconds, then the text. `heading`: on a terminal, the zone is first."""
    if heading and target.width is not None:
        yield target.titled("time")
    time, text = target.time(record.at_s, "milliseconds"), plain(record.text)
    if target.width is None:
        yield f"{time}\t{text}"
    else:
        yield from target.sentence(text, f"{time}  ", " " * (len(time) + 2))
