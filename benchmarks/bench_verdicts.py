"""How long a verdict takes while a coordinator has much to do.

    python -m benchmarks.bench_verdicts [--nodes N] [--heartbeat S] [--watchers N]

The daemons of a site send ten times the heartbeats of a real one: each sends one each 0.5 s. 1,000 people follow the
gangs. Meanwhile nodes report a fatal Xid, one after another. Measured: the milliseconds from the moment at which a
node's daemon gets the fault from its sensor to the moment at which the verdict (UNFIT) is in the journal; the
heartbeats that the coordinator takes; what it gives up; its memory.

12,500 nodes at ten times the rate would be 25,000 heartbeats a second. No process of Python takes so many, and this
machine can't send them. So there are fewer nodes here, and the figures name the rate that was taken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bench_reconnect import POLL_S, start_load, wait_attached
from benchmarks.load import site
from benchmarks.load.site_processes import Process, count_evicted, cpu_s, made_site, memory_mib
from muster.daemon.host import clock

NODES = 1000
PROCESSES = 2
HEARTBEAT_S = 0.5
"""Seconds between the heartbeats of each daemon: a tenth of a site's."""
WATCHERS = 1000
VERDICTS = 120
FAULT_INTERVAL_S = 0.25
WATCHERS_DEADLINE_S = 60.0
"""Seconds after which the measurement goes on with the watchers that were admitted until then."""
VERDICTS_DEADLINE_S = 60.0
"""Seconds after the last fault, within which all verdicts must be in the journal."""

Figures = dict[str, float | str]


async def report_faults(load: Sequence[Process], others: int) -> dict[str, float]:
    """Let `VERDICTS` random nodes report a fatal Xid. Returns when each of them got it from its sensor."""
    names = site.other_nodes(others)
    process_of = {
        name: process
        for number, process in enumerate(load)
        for name in names[others * number // len(load) : others * (number + 1) // len(load)]
    }
    chosen = site.sample(names, VERDICTS)
    for name in chosen:
        process_of[name].say(name)
        await asyncio.sleep(FAULT_INTERVAL_S)
    return await told(load, "signal", chosen)


async def told(processes: Sequence[Process], what: str, names: Sequence[str]) -> dict[str, float]:
    """When each of these nodes was told of. Raises TimeoutError: not all were."""
    async with asyncio.timeout(VERDICTS_DEADLINE_S):
        while True:
            lines = [line for process in processes for line in process.lines if what in line]
            found = {str(line[what]): float(line["at"]) for line in lines}
            if found.keys() >= set(names):
                return found
            await asyncio.sleep(POLL_S)


async def _wait_for_watchers(watching: Process, count: int) -> None:
    try:
        async with asyncio.timeout(WATCHERS_DEADLINE_S):
            while watching.told["watching"] < count:  # noqa: ASYNC110  # other processes set no event of this one
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        print(f"only {watching.told['watching']} of {count} watchers are admitted", flush=True)


async def measure_verdicts(folder: Path, nodes: int, heartbeat_s: float, watchers: int) -> Figures:
    """See the module."""
    async with made_site(folder) as (found, _):
        others, begun = nodes - site.GANGS * site.NODES_PER_GANG, clock.monotonic()
        coordinator = await Process.start("site_coordinator", folder, 0, others, heartbeat_s)
        port = int(await coordinator.wait_told("port"))
        load = await start_load(found, port, nodes, PROCESSES)
        await wait_attached(load, nodes, begun)
        await load[0].wait_told("running")
        watching = await Process.start("site_watchers", folder, port, watchers)
        await _wait_for_watchers(watching, watchers)
        started, cpu_before = clock.monotonic(), cpu_s(coordinator.pid)
        heartbeats, hellos = _sum(load, "heartbeats"), _sum(load, "hellos")
        rss_before, admitted = memory_mib(coordinator.pid, "VmRSS"), watching.told["watching"]
        calm_lines = [len(process.lines) for process in (coordinator, *load)]
        reported = await report_faults(load[1:], others)
        judged = await told([coordinator], "judged", list(reported))
        took_s, cpu = clock.monotonic() - started, cpu_s(coordinator.pid) - cpu_before
        latencies_ms = sorted(1000 * (judged[name] - at) for name, at in reported.items())
        figures: Figures = {
            "verdict_p50_ms": round(statistics.median(latencies_ms), 1),
            "verdict_p99_ms": round(statistics.quantiles(latencies_ms, n=100, method="inclusive")[98], 1),
            "verdict_max_ms": round(latencies_ms[-1], 1),
            "verdicts": len(latencies_ms),
            "verdict_nodes": nodes,
            "heartbeats_offered_per_s": round(nodes / heartbeat_s),
            "heartbeats_per_s": round((_sum(load, "heartbeats") - heartbeats) / took_s),
            "streams_lost": _sum(load, "hellos") - hellos,
            "coordinator_lag_p50_ms": _lag(coordinator.lines[calm_lines[0] :], 50),
            "coordinator_lag_p99_ms": _lag(coordinator.lines[calm_lines[0] :], 99),
            "load_lag_p99_ms": max(_lag(p.lines[n:], 99) for p, n in zip(load[1:], calm_lines[2:], strict=True)),
            "watchers_admitted": admitted,
            "watchers_given_up": watching.told["given_up"],
            "watchers_at_the_end": watching.told["watching"],
            "views_sent": watching.told["views"],
            "verdict_coordinator_cpu_percent": round(100 * cpu / took_s),
            "verdict_coordinator_rss_mib": round(rss_before),
            "verdict_coordinator_peak_mib": round(memory_mib(coordinator.pid, "VmHWM")),
        }
        for process in (watching, *load):
            await process.kill()
        await coordinator.stop()
        return figures | {"evicted_under_load": count_evicted(folder / "state") - len(latencies_ms)}


def _lag(lines: Sequence[dict[str, float | str]], percent: int) -> float:
    """A percentile of the lags that were told, in milliseconds."""
    lags = [float(line["lag_ms"]) for line in lines if "lag_ms" in line]
    return round(statistics.quantiles(lags, n=100, method="inclusive")[percent - 1], 1)


def _sum(load: Sequence[Process], key: str) -> int:
    return sum(process.told[key] for process in load)


def main() -> None:
    """Measure once, and print the figures."""
    parser = argparse.ArgumentParser(description="how long a verdict takes while a coordinator has much to do")
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--heartbeat", type=float, default=HEARTBEAT_S, help="seconds; default %(default)s")
    parser.add_argument("--watchers", type=int, default=WATCHERS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measuring = measure_verdicts(Path(name), options.nodes, options.heartbeat, options.watchers)
        print(json.dumps(asyncio.run(measuring)))


if __name__ == "__main__":
    main()
