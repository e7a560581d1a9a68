"""`make bench-trust`: measures what callers without rights cost.

    python -m benchmarks.bench_trust [--seconds S] [--nodes N]

- Anonymous callers: 64 of them, in a process of their own, send as much as they can to a real musterd, which meanwhile
  sends heartbeats to a scripted coordinator in this process. Measured: by how much musterd's memory grows, at its peak
  and at the end, and the heartbeats that it misses.
- A user with valid credentials and without a job, who holds all that one user can (`benchmarks.bench_known`).
- A restart of the coordinator of 12,500 nodes (`benchmarks.bench_reconnect`).
- The time of a verdict under ten times the heartbeats and 1,000 watchers (`benchmarks.bench_verdicts`).
- Anonymous connections to a coordinator that make no call (`benchmarks.bench_idle_connections`).
- What TLS costs a recovery is measured by `make bench-tls`; its last figure is repeated here, null if there is none.

The output is a table of all figures. The last line is a JSON object with the main figures. Names contain the units.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import bench_idle_connections, bench_known, bench_verdicts
from benchmarks.bench_reconnect import DEADLINE_S, NODES, PROCESSES, reconnect
from muster.daemon.host import clock
from muster.daemon.transport.channel import bind, make_server
from muster.daemon.transport.identity import SecretCredentials
from muster.daemon.transport.server_limits import COORDINATOR
from muster.v1 import node_pb2, node_pb2_grpc

ROOT = Path(__file__).resolve().parents[1]
CALLERS = 64
ATTACK_S = 20.0
HEARTBEAT_S = 1.0
"""Seconds between heartbeats. A site has 5 s: this finds shorter pauses."""
SETTLE_S = 3.0
"""Seconds before the attack, in which musterd finishes its start."""

REPORTED_FIGURES = (
    "anonymous_rss_mib",
    "known_rss_mib",
    "known_heartbeats_missed",
    "known_verdict_p99_ms",
    "reconnect_12500_s",
    "verdict_p99_ms",
    "tls_overhead_percent",
    "evicted",
)
"""The figures of the last line; null: not measured. `evicted` counts the nodes that were removed or judged without a
fault, in all measurements."""
TLS_OVERHEAD = ROOT / "build/tls_overhead.json"

Figures = dict[str, float | str]


class ScriptedCoordinator(node_pb2_grpc.NodeServiceServicer):
    """Answers a node daemon, and notes when each heartbeat arrives (seconds of the monotonic clock)."""

    def __init__(self) -> None:
        self.heard_at: list[float] = []
        self.probe_address = ""
        self.attached = asyncio.Event()
        self.attachments = 0

    async def Attach(
        self, request_iterator: AsyncIterator[node_pb2.NodeMessage], context: Any
    ) -> AsyncIterator[node_pb2.NodeOrder]:
        """See node.proto."""
        async for message in request_iterator:
            if message.HasField("hello"):
                self.attachments += 1
                self.probe_address = message.hello.probe_address
                self.attached.set()
            if message.HasField("heartbeat"):
                self.heard_at.append(clock.monotonic())
            yield node_pb2.NodeOrder(term=1, seq=message.heartbeat.seq, heartbeat_s=HEARTBEAT_S)


class MeasuredDaemon:
    """A musterd process and its memory."""

    def __init__(self, pid: int, coordinator: ScriptedCoordinator) -> None:
        self._pid = pid
        self.coordinator = coordinator

    def memory_mib(self, field: str) -> float:
        """A field of /proc/PID/status, in MiB: VmRSS now, VmHWM at the peak so far."""
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) / 1024

    def cpu_s(self) -> float:
        """CPU seconds that the process has used."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100


@asynccontextmanager
async def running_daemon(folder: Path) -> AsyncIterator[MeasuredDaemon]:
    """A musterd of its own, attached to a scripted coordinator in this process."""
    credentials, coordinator = SecretCredentials.create(folder / "secret"), ScriptedCoordinator()
    server = make_server(credentials, COORDINATOR)
    node_pb2_grpc.add_NodeServiceServicer_to_server(coordinator, server)
    port = bind(server, "127.0.0.1:0")
    await server.start()
    (folder / "kmsg").touch()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "muster.daemon.node", "--node=n1", "--listen=127.0.0.1:0", "--memory="),
        *(f"--coordinator=127.0.0.1:{port}", f"--auth=secret:{folder / 'secret'}", f"--kmsg={folder / 'kmsg'}"),
    )
    try:
        async with asyncio.timeout(60):
            await coordinator.attached.wait()
        yield MeasuredDaemon(process.pid, coordinator)
    finally:
        process.terminate()
        await process.wait()
        await server.stop(None)


async def anonymous_callers(folder: Path, attack_s: float) -> Figures:
    """Megabytes by which musterd grows under anonymous callers, and heartbeats that it misses meanwhile."""
    async with running_daemon(folder) as daemon:
        await asyncio.sleep(SETTLE_S)
        before, cpu_before, begun = daemon.memory_mib("VmRSS"), daemon.cpu_s(), clock.monotonic()
        attack = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.load.anonymous_callers"),
            *(daemon.coordinator.probe_address, str(CALLERS), str(attack_s)),
            stdout=asyncio.subprocess.PIPE,
        )
        told, _ = await attack.communicate()
        await asyncio.sleep(2 * HEARTBEAT_S)
        ended, coordinator = clock.monotonic(), daemon.coordinator
        print(told.decode().strip())
        heard = [begun, *(at for at in coordinator.heard_at if begun <= at <= ended), ended]
        gaps = [later - earlier for earlier, later in pairwise(heard)]
        return {
            "anonymous_rss_mib": round(daemon.memory_mib("VmHWM") - before, 1),
            "anonymous_rss_after_mib": round(daemon.memory_mib("VmRSS") - before, 1),
            "musterd_rss_mib": round(before, 1),
            "musterd_cpu_s": round(daemon.cpu_s() - cpu_before, 1),
            "heartbeats_heard": len(heard) - 2,
            "heartbeats_missed": sum(max(0, int(gap / HEARTBEAT_S) - 1) for gap in gaps),
            "longest_gap_s": round(max(gaps), 2),
            "attachments": coordinator.attachments,
        }


Measurement = Callable[[Path, float], Awaitable[Figures]]


async def all_nodes_reconnect(nodes: int, folder: Path, _: float) -> Figures:
    """Seconds until all nodes are attached again to a restarted coordinator; empty: it took too long."""
    try:
        return await reconnect(folder, nodes, PROCESSES)
    except TimeoutError:
        print(f"{nodes} nodes were not attached within {DEADLINE_S:g} s", flush=True)
        return {}


async def verdicts_under_load(folder: Path, _: float) -> Figures:
    """How long verdicts take while the coordinator has much to do."""
    return await bench_verdicts.measure_verdicts(
        folder, bench_verdicts.NODES, bench_verdicts.HEARTBEAT_S, bench_verdicts.WATCHERS
    )


async def connections_without_a_call(folder: Path, _: float) -> Figures:
    """What idle anonymous connections cost a coordinator."""
    return await bench_idle_connections.idle_connections(folder, bench_idle_connections.CONNECTIONS)


def tls_overhead() -> Figures:
    """By how many percent recoveries take longer with TLS, as `make bench-tls` measured last; empty: never."""
    if not TLS_OVERHEAD.exists():
        return {}
    return {"tls_overhead_percent": json.loads(TLS_OVERHEAD.read_text())["tls_overhead_percent"]}


MEASUREMENTS: tuple[Measurement, ...] = (
    anonymous_callers,
    bench_known.known_callers,
    connections_without_a_call,
    verdicts_under_load,
)
"""Each measurement gets an empty folder of its own, and the seconds of an attack."""


async def _measure(attack_s: float, nodes: int) -> Figures:
    figures: Figures = tls_overhead()
    for measurement in (*MEASUREMENTS, partial(all_nodes_reconnect, nodes)):
        with tempfile.TemporaryDirectory() as folder:
            figures |= await measurement(Path(folder), attack_s)
    counted = [float(figures[name]) for name in ("evicted_reconnect", "evicted_under_load") if name in figures]
    return figures | ({"evicted": sum(counted)} if counted else {})


def _print(figures: Figures) -> None:
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name, value if isinstance(value, str) else f"{value:,g}")
    Console(width=100).print(table)
    print(json.dumps({name: figures.get(name) for name in REPORTED_FIGURES}))


def main() -> None:
    """The entry point of `make bench-trust`."""
    parser = argparse.ArgumentParser(description="measures what callers without rights cost")
    parser.add_argument("--seconds", type=float, default=ATTACK_S, help="seconds of each attack; default %(default)g")
    parser.add_argument("--nodes", type=int, default=NODES, help="nodes that reconnect; default %(default)s")
    options = parser.parse_args()
    _print(asyncio.run(_measure(options.seconds, options.nodes)))


if __name__ == "__main__":
    main()
