"""`muster events [-f] [JOB]`: the coordinator's journal, one line an event."""

from __future__ import annotations

import argparse
import time

from muster.launcher.command import Command, connect, load_site, say_away
from muster.launcher.coordinator import gang_ref
from muster.launcher.output.json_text import to_json
from muster.v1.api_pb2 import EventRecord, EventsRequest


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", nargs="?", help="its Slurm job id, or its gang id; none: all (operators)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with live events until the job ends")
    parser.add_argument("--after", type=int, default=0, metavar="POSITION", help="leave out events up to this one")
    parser.add_argument("--json", action="store_true", help="one EventRecord (api.proto) a line")


async def _run(options: argparse.Namespace) -> int:
    request = EventsRequest(follow=options.follow, after=options.after)
    if options.job is not None:
        request.gang.CopyFrom(gang_ref(options.job))
    async with connect(load_site(options)) as coordinator:
        follow = coordinator.follow_events(request, say_away) if options.follow else coordinator.events(request)
        async for record in follow:
            if options.json:
                print(to_json(record), flush=True)
            elif not record.sentinel:
                print(event_line(record), flush=True)
    return 0


COMMAND = Command("events", "show what happened to a job, and why", _arguments, _run)


def event_line(record: EventRecord) -> str:
    """One event for a person: local time to the millisecond, its text."""
    clock = time.strftime("%H:%M:%S", time.localtime(record.at_s))
    return f"{clock}.{int(record.at_s * 1000) % 1000:03d}  {record.text}"
