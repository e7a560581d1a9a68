"""The coordinator of a measurement (`site`), in a process of its own.

    python -m benchmarks.load.site_coordinator FOLDER PORT OTHER_NODES HEARTBEAT_S

Each line of its output is a JSON object: {"port": …} when it serves, {"judged": NODE, "at": S} at once after a verdict
is in the journal (seconds of the monotonic clock), {"lag_ms": …} twice a second. It ends when its standard input ends.
"""

from __future__ import annotations

import asyncio
import cProfile
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.load import site
from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.coordinator.server import Coordinator, Settings
from muster.daemon.host import clock
from muster.daemon.host.process.process_memory import collect_seldom
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.site_config import start_logging
from muster.slurm.client.fake.fake_slurm import FakeSlurm

PROFILE = os.environ.get("MUSTER_PROFILE", "")
"""A file for the profile of the event loop's thread; empty: none."""


class _Verdicts(logging.Handler):
    """Tells each verdict: the engine logs facts right after they are in the journal."""

    def emit(self, record: logging.LogRecord) -> None:
        words = record.getMessage().split()
        if words[0] == "node" and words[3].startswith("UNFIT"):
            site.tell(judged=words[1], at=clock.monotonic())


async def _serve(found: site.Site, port: int, others: int, heartbeat_s: float) -> None:
    policy = Policy.load()
    # The measurement has many more verdicts than a site would let Muster act on.
    policy.limits = replace(policy.limits, nodes_per_hour=10_000, fraction=1.0)
    slurm = FakeSlurm(site.cluster(others, os.getuid()))
    settings = Settings(
        f"127.0.0.1:{port}",
        found.folder / "state",
        slurm,
        found.credentials(),
        Rights(frozenset()),
        policy=policy,
        heartbeat_s=heartbeat_s,
        certificate_files=found.certificate_files(),
    )
    coordinator = await Coordinator.open(settings)
    await coordinator.start()
    site.tell(port=coordinator.port)
    telling = asyncio.create_task(site.tell_lag())
    await asyncio.to_thread(sys.stdin.read)
    telling.cancel()
    await coordinator.stop()


def main() -> None:
    """See the module."""
    folder, port, others, heartbeat_s = sys.argv[1:]
    start_logging("error")
    collect_seldom()
    facts = logging.getLogger("muster.facts")
    facts.setLevel("INFO")
    facts.propagate = False
    facts.addHandler(_Verdicts())
    serving = _serve(site.Site(Path(folder)), int(port), int(others), float(heartbeat_s))
    if not PROFILE:
        asyncio.run(serving)
        return
    profile = cProfile.Profile()
    profile.runcall(asyncio.run, serving)
    profile.dump_stats(PROFILE)


if __name__ == "__main__":
    main()
