"""A coordinator on a journal that stands already, in a process of its own: what a restart takes.

    python -m benchmarks.restart FOLDER

Prints its port once it serves, then the seconds that the journal took of that; ends when its standard input does.
Slurm does not answer, so that nothing follows but the start itself.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from muster.daemon import clock
from muster.daemon.channel import open_channel
from muster.daemon.coordinator.server import Coordinator, Settings
from muster.daemon.identity import SecretCredentials
from muster.daemon.rights import Rights
from muster.daemon.site import start_logging
from muster.slurm.client.fake import FakeSlurm
from muster.slurm.client.fake_cluster import FakeCluster


async def answered(port: int, folder: Path) -> None:
    """Returns once the coordinator says that it serves."""
    async with open_channel(f"127.0.0.1:{port}", SecretCredentials(folder / "secret")) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=30, wait_for_ready=True)


async def _serve(folder: Path) -> None:
    slurm = FakeSlurm(FakeCluster((), now=clock.wall))
    slurm.silent_because = "a measurement"
    credentials = SecretCredentials(folder / "secret")
    before = clock.monotonic()
    coordinator = await Coordinator.open(Settings("127.0.0.1:0", folder, slurm, credentials, Rights(frozenset())))
    load_s = clock.monotonic() - before
    await coordinator.start()
    print(coordinator.port, flush=True)
    print(load_s, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await coordinator.stop()


if __name__ == "__main__":
    start_logging("warning")
    asyncio.run(_serve(Path(sys.argv[1])))
