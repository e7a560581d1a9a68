"""`muster goodput`: to what the time of the GPUs went, over all jobs (docs/GOODPUT.md).

Users see the jobs that they may read, operators all. What has lost most stands first: with `--by node`, the lemons.
"""

from __future__ import annotations

import argparse

from muster.daemon.host import clock
from muster.launcher.command import Command, connect, load_site, print_note, screen, show, time_arguments
from muster.launcher.command_line import since

GROUPS = ("account", "cause", "node", "leaf", "job")


def _arguments(parser: argparse.ArgumentParser) -> None:
    words = "how far back, or from which date on (2026-11-20); default 7d"
    parser.add_argument("--since", type=since, default=since("7d"), metavar="7d", help=words)
    words = "what the rows are; default: what losses are charged with"
    parser.add_argument("--by", choices=GROUPS, default="cause", help=words)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print a line for each row and category, in GPU hours")
    form.add_argument("--json", action="store_true", help="print one JSON object, in GPU hours")
    time_arguments(parser)


async def _run(options: argparse.Namespace) -> int:
    from muster.launcher.output import goodput_table

    site, until = load_site(options), clock.wall()
    async with connect(site) as coordinator:
        pages = [page async for page in coordinator.account(until - options.since, options.by)]
    rows = [row for page in pages for row in page.rows]
    found = goodput_table.groups(rows, site.gpu_hour_price)
    if options.csv:
        print(goodput_table.as_csv(found, options.by), end="", flush=True)
    elif options.json:
        print(goodput_table.as_json(found, options.by, pages[0].since_s, pages[0].until_s), flush=True)
    else:
        show(goodput_table.goodput_lines(found, options.by, site.gpu_hour_price, screen(options)))
    if any(page.incomplete for page in pages):
        print_note("the coordinator has just started, and still reads the accounts of earlier jobs: ask again soon")
    return 0


COMMAND = Command(_arguments, _run)
