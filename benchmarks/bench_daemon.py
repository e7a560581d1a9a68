"""`make bench-daemon`: what musterd costs a node, and how fast it is.

    python -m benchmarks.bench_daemon [--seconds S] [--lines N] [--planned-swap [--cluster NAME] [--runs N]]

One real musterd with 8 GPUs (the stand-in for NVIDIA's library, read by the real nvidia-ml-py), all its sensors at 1 Hz
and a heartbeat each 5 s, and one real coordinator whose Slurm is a fake one. A secret file proves who they are, so
their connection over loopback is plain text. Prometheus' node exporter runs beside them, scraped once a second.

- cpu_percent: of one core, in all processes of musterd, over S seconds that begin 5 s after its start.
- pss_mib: the proportional memory (PSS) of all these processes after that. The coordinator shares pages with them.
  `alone_mib` counts these pages in full.
- signal_p99_ms: from a line that is written to the file of the kernel log to the moment at which the coordinator's
  engine has decided about it and has written what follows to its journal. N lines at random distances.
- start_s: from the start of the process to its first heartbeat in the coordinator, the median of 5 starts.
- planned_swap_s: from a precursor to the first step of the next generation, on a cluster of containers; the median of
  `bench_recovery --faults precursor`. Ranks train on for a part of that time. null without --planned-swap.
- peer: the same cpu_percent and pss_mib of the node exporter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import socket
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.load import process_cost, site
from benchmarks.load.site_processes import ROOT, Process
from benchmarks.node_exporter import Exporter, NoExporterError, scraped_exporter
from muster.daemon.host import clock
from muster.slurm.image import nvml_stand_in

GPUS = 8
SETTLE_S = 5.0
"""Seconds after the start that are not counted: the first reading of all GPUs, the first scrapes."""
LINE_PAUSE_S = (0.02, 0.18)
"""Seconds between two lines of the kernel log: at any moment of the sensors' second."""
STARTS = 5
DEADLINE_S = 60.0
TARGETS = {"cpu_percent": 1.0, "pss_mib": 60.0, "signal_p99_ms": 100.0, "start_s": 1.0, "planned_swap_s": 3.0}
NODE = site.other_nodes(1)[0]

Figures = dict[str, Any]


@dataclass
class Node:
    """The folder of a node: its kernel log, its GPUs, and what the coordinator told."""

    folder: Path
    port: int
    coordinator: Process

    @property
    def kernel_log(self) -> Path:
        return self.folder / "kmsg"

    @property
    def library(self) -> Path:
        return self.folder / nvml_stand_in.LIBRARY

    def prepare(self) -> None:
        """Make the kernel log and the GPUs.

        Raises:
            SystemExit: no compiler.
        """
        compiled = nvml_stand_in.library()
        if compiled is None:
            sys.exit("bench_daemon: gcc is needed, for the stand-in for NVIDIA's library")
        shutil.copy(compiled, self.library)
        control = Path(f"{self.library}{nvml_stand_in.CONTROL_SUFFIX}")
        nvml_stand_in.ControlFile.of_healthy_gpus(GPUS).write(control)
        self.kernel_log.touch(mode=0o644)

    async def start_musterd(self) -> asyncio.subprocess.Process:
        """Start musterd as its unit does."""
        flags = {
            "--coordinator": f"127.0.0.1:{self.port}",
            "--listen": "127.0.0.1:0",
            "--auth": f"secret:{self.folder / 'secret'}",
            "--node": NODE,
            "--kmsg": self.kernel_log,
            "--nvidia-driver": f"{self.library}{nvml_stand_in.CONTROL_SUFFIX}",
            "--memory": "",
            "--log-level": "error",
        }
        words = [str(word) for flag in flags.items() for word in flag]
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "muster.daemon.node", *words),
            cwd=ROOT,
            env=os.environ | {"LD_LIBRARY_PATH": str(self.folder)},
        )


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    await process.wait()


@asynccontextmanager
async def running_node(folder: Path) -> AsyncIterator[tuple[Node, asyncio.subprocess.Process, float]]:
    """A coordinator and musterd. Yields the seconds from musterd's start to its first heartbeat, too."""
    site.Site.create(folder)
    coordinator = await Process.start("node_coordinator", folder)
    node = Node(folder, int(await coordinator.wait_told("port")), coordinator)
    node.prepare()
    begun = clock.monotonic()
    musterd = await node.start_musterd()
    try:
        async with asyncio.timeout(DEADLINE_S):
            at = await coordinator.wait_told("heartbeat_at")
        yield node, musterd, at - begun
    finally:
        await _end(musterd)
        await coordinator.stop()


async def measure_start() -> float:
    """Seconds from the start to the first heartbeat."""
    with tempfile.TemporaryDirectory() as folder:
        async with running_node(Path(folder)) as (_, _, start_s):
            return start_s


async def measure_cost(musterd: int, exporter: Exporter | None, seconds: float) -> Figures:
    """Processor time and memory of musterd and of its peer over the same time."""
    await asyncio.sleep(SETTLE_S)
    pids = {"musterd": musterd} | ({"peer": exporter.pid} if exporter else {})
    before = {name: process_cost.tree_cpu_s(pid) for name, pid in pids.items()}
    scrapes, begun = exporter.scrapes if exporter else 0, clock.monotonic()
    await asyncio.sleep(seconds)
    passed = clock.monotonic() - begun
    found = {
        name: {
            "cpu_percent": round(100 * (process_cost.tree_cpu_s(pid) - before[name]) / passed, 2),
            "pss_mib": round(process_cost.tree_pss_mib(pid), 1),
            "alone_mib": round(process_cost.tree_alone_mib(pid), 1),
        }
        for name, pid in pids.items()
    }
    if exporter:
        found["peer"]["scrapes_per_s"] = round((exporter.scrapes - scrapes) / passed, 2)
    return found


async def measure_signals(node: Node, count: int) -> Figures:
    """Milliseconds from a line of the kernel log to the decision. Each line is of another device."""
    chance, written = random.Random(17), dict[str, float]()
    with node.kernel_log.open("a", buffering=1) as log:
        for number in range(count):
            await asyncio.sleep(chance.uniform(*LINE_PAUSE_S))
            line = f"NVRM: Xid (PCI:{number:04x}:3b:00): 63, pid='<unknown>', name=<unknown>, line {number}"
            written[line] = clock.monotonic()
            log.write(f"{line}\n")
    async with asyncio.timeout(DEADLINE_S):
        while len(node.coordinator.lines) < count:  # noqa: ASYNC110  # another process sets no event of this one
            await asyncio.sleep(0.05)
    took = sorted(1000 * (float(each["at"]) - written[str(each["decided"])]) for each in node.coordinator.lines)
    return {
        "signal_p50_ms": round(statistics.median(took), 1),
        "signal_p99_ms": round(statistics.quantiles(took, n=100, method="inclusive")[98], 1),
        "signal_max_ms": round(took[-1], 1),
        "signals": len(took),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def _peer() -> AsyncIterator[Exporter | str]:
    """The running exporter, or why there is none."""
    try:
        async with scraped_exporter(_free_port()) as exporter:
            yield exporter
    except NoExporterError as error:
        yield str(error)


async def measure(seconds: float, lines: int) -> Figures:
    """All but the planned swap."""
    starts = [await measure_start() for _ in range(STARTS)]
    with tempfile.TemporaryDirectory() as folder:
        async with running_node(Path(folder)) as (node, musterd, _), _peer() as peer:
            cost = await measure_cost(musterd.pid, peer if isinstance(peer, Exporter) else None, seconds)
            signals = await measure_signals(node, lines)
    found = cost["musterd"] | signals | {"start_s": round(statistics.median(starts), 2)}
    return found | {"start_max_s": round(max(starts), 2), "peer": cost.get("peer", {"absent": str(peer)})}


def planned_swap(cluster_name: str | None, runs: int) -> Figures:
    """The median of bench_recovery's precursor."""
    from benchmarks.bench_recovery import PLANNED
    from benchmarks.bench_recovery import measure as measure_recovery
    from muster.slurm.testcluster.cluster import Cluster
    from muster.slurm.testcluster.spec import ClusterSpec

    cluster = Cluster.attach(cluster_name) if cluster_name else Cluster.up(ClusterSpec(nodes=10))
    try:
        found = measure_recovery(cluster, PLANNED[0], runs, Console(stderr=True).print)
    finally:
        if not cluster_name:
            cluster.down()
    return {
        "planned_swap_s": round(statistics.median(found.total), 2),
        "planned_swap_max_s": round(max(found.total), 2),
        "planned_swap_steps_again": max(found.redone),
    }


def _print(figures: Figures) -> None:
    table = Table("figure", "value", "target")
    for name, value in figures.items():
        table.add_row(name, str(value), f"{TARGETS[name]:g}" if name in TARGETS else "")
    Console(width=120).print(table)
    print(json.dumps({name: figures.get(name) for name in (*TARGETS, "peer")}))


def main() -> None:
    """The entry point of `make bench-daemon`."""
    parser = argparse.ArgumentParser(description="measures what musterd costs a node")
    parser.add_argument("--seconds", type=float, default=60.0, help="over which the cost is taken; default %(default)g")
    parser.add_argument("--lines", type=int, default=250, help="of the kernel log; default %(default)s")
    parser.add_argument("--planned-swap", action="store_true", help="measure that, too: needs containers")
    parser.add_argument("--cluster", help="the running cluster for that, instead of a new one")
    parser.add_argument("--runs", type=int, default=5, help="planned swaps; default %(default)s")
    options = parser.parse_args()
    figures = asyncio.run(measure(options.seconds, options.lines))
    if options.planned_swap:
        figures |= planned_swap(options.cluster, options.runs)
    else:
        figures["planned_swap"] = "not measured: --planned-swap needs a cluster of containers"
    _print(figures)


if __name__ == "__main__":
    main()
