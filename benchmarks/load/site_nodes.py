"""The daemons of many nodes in one process: the load of a measurement (`site`).

    python -m benchmarks.load.site_nodes FOLDER PORT FIRST COUNT

Each node runs musterd's own stream (`muster.daemon.node.coordinator_stream`) on a connection of its own. Each line of
the output is a JSON object, once a second: {"attached": nodes, "last_at": S, "hellos": …, "heartbeats": …}.
`last_at` is when the last node's hello was answered. A line of the standard input is the name of a node that reports an
Xid now; {"signal": NODE, "at": S} answers it. The process ends when its standard input ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.load import site
from muster.daemon.host import clock
from muster.daemon.node.coordinator_stream import NodeStream
from muster.daemon.node.sensors.sensor import Observation
from muster.daemon.transport import call_binding
from muster.daemon.transport.identity import Credentials
from muster.daemon.transport.site_config import start_logging
from muster.daemon.transport.tls import ServerKey, Trust
from muster.v1 import node_pb2

TOLD_S = 0.5
"""Seconds between two lines of the output."""
START_INTERVAL_S = 0.015
"""Seconds between the first attaches of two nodes of this process."""
LOOPBACK = ("127.0.0.1",)
XID = 79
"""The GPU has fallen off the bus: the node is UNFIT."""


class Counts:
    """What the nodes of this process did."""

    def __init__(self) -> None:
        self.attached = self.hellos = self.heartbeats = 0
        self.last_at = 0.0


class LoadedNode:
    """One node: its stream, and what the stream asks of a daemon."""

    def __init__(
        self,
        name: str,
        address: str,
        credentials: Credentials,
        trust: Trust,
        key: ServerKey,
        counts: Counts,
        probe: str,
    ) -> None:
        """`probe`: the address at which probes of the node are answered."""
        self._counts = counts
        self._key = key
        self._attached = False
        self._hello_message = node_pb2.NodeHello(
            node=name, boot_id="boot", probe_address=probe, incarnation=f"{name}-1", addresses=LOOPBACK,
            public_key=key.public_key,
        )  # fmt: skip
        self.stream = NodeStream(
            address,
            credentials,
            self._hello,
            5.0,
            self,
            addresses=lambda: LOOPBACK,
            trust=trust,
            key=key,
        )

    async def _hello(self) -> node_pb2.NodeHello:
        self._counts.hellos += 1
        self._counts.attached -= self._attached
        self._attached = False
        self._hello_message.certified_by = self._key.certified_by
        return self._hello_message

    def kept(self) -> list[tuple[str, int]]:
        """See coordinator_stream.KeptGangs. Called for each heartbeat: the first one follows the answer to hello."""
        self._counts.heartbeats += 1
        if not self._attached:
            self._attached = True
            self._counts.attached += 1
            self._counts.last_at = clock.monotonic()
        return []

    def mark_obsolete(self, gang: str, generation: int) -> None:
        """See coordinator_stream.KeptGangs."""


async def tell_counts(counts: Counts) -> None:
    """Print the counts until cancelled."""
    while True:
        used = os.times()
        site.tell(**vars(counts), cpu_s=round(used.user + used.system, 2), told_at=clock.monotonic())
        await asyncio.sleep(TOLD_S)


async def read_signals(nodes: dict[str, LoadedNode]) -> None:
    """Let the nodes that are named on the standard input report an Xid, until it ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode().strip():
        site.tell(signal=line, at=clock.monotonic())
        nodes[line].stream.report(Observation("xid", XID, "", "NVRM: Xid 79: a measurement", clock.wall()))


async def _start(nodes: Iterable[LoadedNode], running: list[asyncio.Task[Any]]) -> None:
    """Start the nodes one after another, as those of a site do: nobody has told them yet when to attach."""
    for node in nodes:
        running.append(asyncio.create_task(node.stream.run()))
        await asyncio.sleep(START_INTERVAL_S)


async def _run(found: site.Site, port: int, names: list[str]) -> None:
    counts, trust, credentials = Counts(), found.trust(), found.credentials()
    address = f"127.0.0.1:{port}"
    probe = "127.0.0.1:9"
    keys = {name: ServerKey(call_binding.name_of_node_daemon(name)) for name in names}
    nodes = {name: LoadedNode(name, address, credentials, trust, keys[name], counts, probe) for name in names}
    running = [asyncio.create_task(tell_counts(counts)), asyncio.create_task(site.tell_lag())]
    running.append(asyncio.create_task(_start(nodes.values(), running)))
    await read_signals(nodes)
    os._exit(0)  # to close thousands of connections in order takes long, and proves nothing


if __name__ == "__main__":
    start_logging("error")
    first, last = int(sys.argv[3]), int(sys.argv[3]) + int(sys.argv[4])
    asyncio.run(_run(site.Site(Path(sys.argv[1])), int(sys.argv[2]), site.other_nodes(last)[first:]))
