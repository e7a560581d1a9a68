"""The nodes of running gangs, with agents and daemons, in one process: they must not be evicted (`site`).

    python -m benchmarks.load.site_gangs FOLDER PORT

The agents are scripted ones, with real streams. Agents and daemons answer probes. The output is that of
`site_nodes`, with "running": agents whose ranks run. The process ends when its standard input ends.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import grpc.aio

from benchmarks.load import site
from benchmarks.load.site_nodes import Counts, LoadedNode, read_signals, tell_counts
from muster.daemon.node.daemon import make_probe_server
from muster.daemon.testing.scripted_agent import ScriptedAgent
from muster.daemon.transport import call_binding
from muster.daemon.transport.channel import bind
from muster.daemon.transport.identity import Credentials
from muster.daemon.transport.site_config import start_logging
from muster.daemon.transport.tls import ServerKey, Trust
from muster.v1.common_pb2 import JobSpec

PING_S = 1.0
RETRY_S = 1.0


class GangCounts(Counts):
    """What the nodes and agents of this process did."""

    def __init__(self) -> None:
        super().__init__()
        self.running = 0


async def run_agent(
    gang: int, number: int, address: str, credentials: Credentials, trust: Trust, counts: Any
) -> NoReturn:
    """One agent: attached for as long as it can be."""
    spec = JobSpec(name="measured", nodes=site.NODES_PER_GANG - 1, spares=1, ranks_per_node=1, max_failures=3)
    agent = ScriptedAgent(
        site.gang_node(gang, number), spec, credentials,
        gang=f"gang{gang:02d}", job=site.gang_job(gang), batch_host=number == 0, trust=trust,
    )  # fmt: skip
    await agent.open()
    pinging = asyncio.create_task(_ping(agent))
    noted = asyncio.create_task(_note_running(agent, counts))
    try:
        while True:
            try:
                await agent.attach(address)
            except grpc.aio.AioRpcError:
                pass
            await asyncio.sleep(random.uniform(RETRY_S / 2, RETRY_S))
    finally:
        pinging.cancel()
        noted.cancel()


async def _note_running(agent: ScriptedAgent, counts: Any) -> None:
    await agent.wait_until(lambda: bool(agent.orders) and not agent.duty.startswith("FENCE"))
    counts.running += 1


async def _ping(agent: ScriptedAgent) -> NoReturn:
    for number in count():
        await asyncio.sleep(PING_S)
        try:
            await agent.ping(number)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, AttributeError):
            continue  # not attached now
    raise AssertionError


async def run_node(name: str, address: str, credentials: Credentials, trust: Trust, counts: Counts) -> None:
    """The daemon of one node: its stream, and its answers to probes."""
    key = ServerKey(call_binding.name_of_node_daemon(name))
    server = make_probe_server(credentials, name, f"{name}-1")
    port = bind(server, "127.0.0.1:0", key.certificates())
    await server.start()
    await LoadedNode(name, address, credentials, trust, key, counts, f"127.0.0.1:{port}").stream.run()


async def _run(found: site.Site, port: int) -> None:
    counts, trust, credentials, address = GangCounts(), found.trust(), found.credentials(), f"127.0.0.1:{port}"
    running = [asyncio.create_task(tell_counts(counts))]
    for gang in range(site.GANGS):
        for number in range(site.NODES_PER_GANG):
            name = site.gang_node(gang, number)
            running.append(asyncio.create_task(run_node(name, address, credentials, trust, counts)))
            running.append(asyncio.create_task(run_agent(gang, number, address, credentials, trust, counts)))
    reading = asyncio.create_task(read_signals({}))
    await asyncio.wait([reading, *running], return_when=asyncio.FIRST_COMPLETED)
    for task in [*running, reading]:
        if task.done():
            task.result()  # a bug of this module
    os._exit(0)


if __name__ == "__main__":
    start_logging("error")
    asyncio.run(_run(site.Site(Path(sys.argv[1])), int(sys.argv[2])))
