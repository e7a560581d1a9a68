"""All nodes of a site reconnect at once to a coordinator that was killed and started again.

    python -m benchmarks.bench_reconnect [--nodes N] [--processes N] [--heartbeat S]

Each node is musterd's own stream on a connection of its own: TLS 1.3 with ECDSA P-256 and no resumption, munge's
credentials where munge is installed. Some nodes belong to running gangs, whose agents are attached, too. Measured: the
seconds from the restart until each node's hello is answered once, the CPU seconds of the coordinator and of the load,
and the evicted nodes.

The daemons send a heartbeat each 30 s here, and each 5 s on a site. On a machine of two cores, the heartbeats of 12,500
nodes alone take the coordinator 0.8 of a core, and the load as much: `benchmarks.bench_verdicts` measures heartbeats.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.load import private_munged, site
from benchmarks.load.site_processes import Process, count_evicted, cpu_s, made_site, memory_mib
from muster.daemon.host import clock

NODES = 12_500
PROCESSES = 3
HEARTBEAT_S = 30.0
DEADLINE_S = 180.0
"""Seconds after which a measurement ends without a figure."""
POLL_S = 0.25
SETTLE_S = 15.0
"""Seconds after the last answer, in which a node that is taken for dead would be evicted."""

Figures = dict[str, float | str]


async def start_load(found: site.Site, port: int, nodes: int, processes: int) -> list[Process]:
    """Start the nodes: those of gangs in the first process, the others in further ones."""
    others = nodes - site.GANGS * site.NODES_PER_GANG
    cuts = [others * number // processes for number in range(processes + 1)]
    gangs = await Process.start("site_gangs", found.folder, port)
    return [
        gangs,
        *[await Process.start("site_nodes", found.folder, port, first, last - first) for first, last in pairwise(cuts)],
    ]


async def wait_attached(load: Sequence[Process], nodes: int, since: float) -> float:
    """Wait until all nodes are attached, each after `since`. Returns when the last one was.

    Raises:
        TimeoutError: they are not within DEADLINE_S.
    """
    async with asyncio.timeout(DEADLINE_S):
        while not _all_attached(load, nodes, since):  # noqa: ASYNC110  # other processes set no event of this one
            await asyncio.sleep(POLL_S)
    return max(process.told["last_at"] for process in load)


def _all_attached(load: Sequence[Process], nodes: int, since: float) -> bool:
    return sum(each.told["attached"] for each in load) >= nodes and all(each.told["told_at"] > since for each in load)


async def reconnect(folder: Path, nodes: int, processes: int, heartbeat_s: float = HEARTBEAT_S) -> Figures:
    """See the module."""
    async with made_site(folder) as (found, munged):
        others = nodes - site.GANGS * site.NODES_PER_GANG
        begun = clock.monotonic()
        first = await Process.start("site_coordinator", folder, 0, others, heartbeat_s)
        port = int(await first.wait_told("port"))
        load = await start_load(found, port, nodes, processes)
        attached_at = await wait_attached(load, nodes, begun)
        await load[0].wait_told("running")
        print(f"all attached for the first time after {attached_at - begun:.0f} s", flush=True)
        await asyncio.sleep(SETTLE_S)
        load_before, munged_before = [cpu_s(process.pid) for process in load], cpu_s(munged) if munged else 0.0
        await first.kill()
        restarted = clock.monotonic()
        second = await Process.start("site_coordinator", folder, port, others, heartbeat_s)
        await second.wait_told("port")
        serving = clock.monotonic()
        served_cpu_s = cpu_s(second.pid)
        answered = await wait_attached(load, nodes, restarted)
        figures: Figures = {
            f"reconnect_{nodes}_s": round(answered - restarted, 1),
            "start_s": round(serving - restarted, 1),
            "coordinator_cpu_s": round(cpu_s(second.pid), 1),
            "coordinator_start_cpu_s": round(served_cpu_s, 1),
            "load_cpu_s": round(sum(cpu_s(p.pid) - before for p, before in zip(load, load_before, strict=True)), 1),
            "munged_cpu_s": round(cpu_s(munged) - munged_before, 1) if munged else 0.0,
            "hellos": sum(process.told["hellos"] for process in load),
            "coordinator_rss_mib": round(memory_mib(second.pid, "VmHWM")),
            "load_rss_mib": round(sum(memory_mib(process.pid, "VmRSS") for process in load)),
            "identity": "munge" if private_munged.MUNGED else "a secret file: munge is not installed here",
        }
        await asyncio.sleep(SETTLE_S)
        for process in load:
            await process.kill()
        await second.stop()
        return figures | {"evicted_reconnect": count_evicted(folder / "state")}


def main() -> None:
    """Measure once, and print the figures."""
    parser = argparse.ArgumentParser(description="all nodes of a site reconnect at once")
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--processes", type=int, default=PROCESSES, help="processes of the load; default %(default)s")
    parser.add_argument("--heartbeat", type=float, default=HEARTBEAT_S, help="seconds; default %(default)g")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(reconnect(Path(folder), options.nodes, options.processes, options.heartbeat))))


if __name__ == "__main__":
    main()
