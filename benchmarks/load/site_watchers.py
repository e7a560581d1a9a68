"""Many people who follow the gangs of a site, in one process: the load of a measurement (`site`).

    python -m benchmarks.load.site_watchers FOLDER PORT COUNT

Each watcher has a connection of its own, and comes again as `muster status -f` does. Each line of the output is a JSON
object, twice a second: {"watching": watchers that have a view and were not given up, "views": …, "given_up": …}. The
process ends when its standard input ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import NoReturn

from benchmarks.load import site
from benchmarks.load.site_nodes import tell_counts
from muster.daemon.transport.identity import Credentials
from muster.daemon.transport.site_config import start_logging
from muster.daemon.transport.tls import Trust
from muster.launcher.coordinator_client import CoordinatorClient, Unavailable
from muster.v1.api_pb2 import GangRef

AT_ONCE = 32
"""Watchers that connect at the same time: people come one after another."""
RETRY_S = 1.0


class WatcherCounts:
    """What the watchers of this process saw."""

    def __init__(self) -> None:
        self.watching = self.views = self.given_up = 0


class Watcher:
    """One person who follows one gang."""

    def __init__(self, gang: int, address: str, counts: WatcherCounts) -> None:
        self._gang = GangRef(gang_id=f"gang{gang:02d}")
        self._address = address
        self._counts = counts
        self._has_view = False

    async def run(self, credentials: Credentials, trust: Trust, places: asyncio.Semaphore) -> NoReturn:
        """Follow the gang for ever."""
        while True:
            try:
                async with places:
                    client = await CoordinatorClient(self._address, credentials, trust).__aenter__()
                async for _ in client.follow(self._gang, self._note_given_up):
                    self._counts.views += 1
                    self._counts.watching += not self._has_view
                    self._has_view = True
            except Unavailable:
                self._note_given_up("")
            await asyncio.sleep(RETRY_S)

    def _note_given_up(self, _: str) -> None:
        self._counts.given_up += 1
        self._counts.watching -= self._has_view
        self._has_view = False


async def _run(found: site.Site, port: int, count: int) -> None:
    counts, places, credentials, trust = WatcherCounts(), asyncio.Semaphore(AT_ONCE), found.credentials(), found.trust()
    watchers = [Watcher(number % site.GANGS, f"127.0.0.1:{port}", counts) for number in range(count)]
    running = [asyncio.create_task(tell_counts(counts))]
    running += [asyncio.create_task(watcher.run(credentials, trust, places)) for watcher in watchers]
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait([ended, *running], return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        if task.done():
            task.result()  # a bug of this module
    os._exit(0)  # to close thousands of connections in order takes long, and proves nothing


if __name__ == "__main__":
    start_logging("error")
    asyncio.run(_run(site.Site(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])))
