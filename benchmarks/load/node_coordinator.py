"""The coordinator of `benchmarks.bench_daemon`, in a process of its own. Its Slurm is a fake one with one node.

    python -m benchmarks.load.node_coordinator FOLDER

Each line of its output is a JSON object: {"port": …} when it serves, {"heartbeat_at": S} at the node's first heartbeat,
{"decided": TEXT, "at": S} when the engine has decided about a signal and has written what follows to the journal
(seconds of the monotonic clock). It ends when its standard input ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from benchmarks.load import site
from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.server import Coordinator, Settings
from muster.daemon.coordinator.shell.engine import Engine
from muster.daemon.host import clock
from muster.daemon.host.process.process_memory import collect_seldom
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.site_config import start_logging
from muster.slurm.client.fake.fake_slurm import FakeSlurm


def tell_what_is_decided(engine: Engine) -> None:
    """Tell of each signal after the engine has processed it, and of the first heartbeat."""
    post, beats = engine.post, []

    def post_and_tell(event: events.Event) -> None:
        post(event)
        if isinstance(event, events.NodeSignalled):
            site.tell(decided=event.text, at=clock.monotonic())
        elif isinstance(event, events.NodeHeartbeat) and not beats:
            beats.append(clock.monotonic())
            site.tell(heartbeat_at=beats[0])

    engine.post = post_and_tell  # type: ignore[method-assign]  # the engine tells nobody of events without a fact


async def _serve(found: site.Site) -> None:
    slurm = FakeSlurm(site.cluster(1, os.getuid()))
    settings = Settings("127.0.0.1:0", found.folder / "state", slurm, found.credentials(), Rights(frozenset()))
    coordinator = await Coordinator.open(settings)
    tell_what_is_decided(coordinator.engine)
    await coordinator.start()
    site.tell(port=coordinator.port)
    await asyncio.to_thread(sys.stdin.read)
    await coordinator.stop()


if __name__ == "__main__":
    start_logging("error")
    collect_seldom()
    asyncio.run(_serve(site.Site(Path(sys.argv[1]))))
