"""A coordinator that starts with an existing journal, in a process of its own: measures a restart.

    python -m benchmarks.restart FOLDER

The program prints its port when it serves, then the seconds that the journal took. It ends when its standard input
ends. Slurm does not answer, so nothing but the start happens.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from muster.daemon.coordinator.server import Coordinator, Settings
from muster.daemon.host import clock
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.channel import open_channel
from muster.daemon.transport.identity import SecretCredentials
from muster.daemon.transport.site_config import start_logging
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm


async def wait_serving(port: int, folder: Path) -> None:
    """Returns when the coordinator reports that it serves."""
    async with open_channel(f"127.0.0.1:{port}", SecretCredentials(folder / "secret")) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=30, wait_for_ready=True)


async def _serve(folder: Path) -> None:
    slurm = FakeSlurm(FakeCluster((), now=clock.wall))
    slurm.unavailable_reason = "a measurement"
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
