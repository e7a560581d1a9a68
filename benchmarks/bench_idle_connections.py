"""What anonymous connections that make no call cost a coordinator.

    python -m benchmarks.bench_idle_connections [--connections N]

Two kinds: connections that send no byte, and connections that finish TLS, open HTTP/2 and then send nothing. Measured:
the KiB of the coordinator's memory for each of them while they are open, what is left afterwards, and the seconds after
which the coordinator has ended them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import tempfile
from pathlib import Path

from benchmarks.load import site
from benchmarks.load.anonymous_callers import PREFACE, SETTINGS
from benchmarks.load.site_processes import Process, made_site, memory_mib
from muster.daemon.host import clock

CONNECTIONS = 5000
AT_ONCE = 64
SETTLE_S = 1.0
DEADLINE_S = 150.0
"""Seconds after which connections that are still open are left alone."""

Figures = dict[str, float | str]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _open(port: int, encrypted: ssl.SSLContext | None, places: asyncio.Semaphore) -> Connection:
    async with places:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=encrypted)
        if encrypted:
            writer.write(PREFACE + SETTINGS)
            await reader.read(1)
        return reader, writer


async def _wait_closed(connection: Connection) -> None:
    reader, writer = connection
    try:
        while await reader.read(65536):
            pass
    except OSError:
        pass
    writer.transport.abort()


async def idle_connections(folder: Path, connections: int) -> Figures:
    """See the module."""
    async with made_site(folder) as (found, _):
        coordinator = await Process.start("site_coordinator", folder, 0, site.NODES_PER_JOB, 5.0)
        port = int(await coordinator.wait_told("port"))
        encrypted = ssl.create_default_context(cafile=found.folder / "authority.pem")
        encrypted.set_alpn_protocols(["h2"])
        figures = await _measure(coordinator.pid, port, None, connections, "silent")
        figures |= await _measure(coordinator.pid, port, encrypted, connections, "idle")
        await coordinator.stop()
        return figures


async def _measure(pid: int, port: int, encrypted: ssl.SSLContext | None, connections: int, kind: str) -> Figures:
    before_mib, begun, places = memory_mib(pid, "VmRSS"), clock.monotonic(), asyncio.Semaphore(AT_ONCE)
    opened = await asyncio.gather(*(_open(port, encrypted, places) for _ in range(connections)))
    last_opened = clock.monotonic()
    await asyncio.sleep(SETTLE_S)
    open_mib = memory_mib(pid, "VmRSS")
    closing = [asyncio.create_task(_wait_closed(connection)) for connection in opened]
    _, still_open = await asyncio.wait(closing, timeout=DEADLINE_S)
    for task in still_open:
        task.cancel()
    return {
        f"{kind}_connections": connections,
        f"{kind}_opened_in_s": round(last_opened - begun, 1),
        f"{kind}_kib_each": round(1024 * (open_mib - before_mib) / connections, 1),
        f"{kind}_left_mib": round(memory_mib(pid, "VmRSS") - before_mib, 1),
        f"{kind}_ended_after_s": round(clock.monotonic() - last_opened, 1),
        f"{kind}_still_open": len(still_open),
    }


def main() -> None:
    """Measure once, and print the figures."""
    parser = argparse.ArgumentParser(description="what anonymous connections that make no call cost a coordinator")
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    connections = parser.parse_args().connections
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(idle_connections(Path(folder), connections))))


if __name__ == "__main__":
    main()
