"""`muster events [-f] [JOB]`: prints the coordinator's journal, one event on each line."""

from __future__ import annotations

import argparse
import time

from muster.daemon.host.plain_text import plain
from muster.launcher.command import Command, connect, load_site, note_coordinator_unavailable
from muster.launcher.coordinator_client import gang_ref
from muster.launcher.output.json_text import to_json
from muster.v1.api_pb2 import EventRecord, EventsRequest


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job", metavar="JOB", nargs="?", help="a Slurm job id or a gang id; default: all jobs (operators only)"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="print new events until the job ends")
    parser.add_argument(
        "--after", type=int, default=0, metavar="POSITION", help="print only the events after this position"
    )
    parser.add_argument("--json", action="store_true", help="print one EventRecord (api.proto) on each line")


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
        async for record in follow:
            if options.json:
                print(to_json(record), flush=True)
            elif not record.sentinel:
                print(format_event(record), flush=True)
    return 0


COMMAND = Command(_arguments, _run)


def format_event(record: EventRecord) -> str:
    """One event for the user: local time in milliseconds, then the text."""
    clock = time.strftime("%H:%M:%S", time.localtime(record.at_s))
    return f"{clock}.{int(record.at_s * 1000) % 1000:03d}  {plain(record.text)}"
