"""`make bench-recovery`: measures the time from a fault to the first finished optimizer step of the next generation.

The container cluster has 10 nodes: 8 ranks, one on each node, and 2 spares. The model has 3.2 M parameters and uses
AdamW. A snapshot is taken at every step; heartbeats come every 5 s. Each fault is injected `--runs` times. The output
is the median, the worst value and the phases of each fault; the last line is a JSON object. `--json FILE` also writes
that object to a file, with the date and the machine. `make bench-recovery` writes build/recovery.json; `make figures`
makes the README's picture and table from it.

The clock starts when the fault takes effect, as the cluster tool reports. It stops when the coordinator learns of the
first step of the next generation. All containers share this host's clock. `steps_redone` counts the repeated steps in
the output of rank 0. After a precursor the ranks train on until they leave the node: for that time, `detect`, nothing
is lost.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from muster.slurm.image.recipe import SUITES
from muster.slurm.testcluster.cluster import Cluster
from muster.slurm.testcluster.spec import ClusterSpec
from muster.slurm.testcluster.training import FATAL_XID_LINE, PRECURSOR_XID_LINE, Training, TrainingSpec

PHASES = ("detect", "fence", "start", "first_step")

Inject = Callable[[Cluster, str, Training], float]


@dataclass(frozen=True)
class Fault:
    """One kind of fault. `node0`: the target is the batch host, which runs rank 0; one job can lose it only once."""

    name: str
    inject: Inject
    target_s: tuple[float, float]
    node0: bool = False
    runs_per_job: int = 2


@dataclass
class Figures:
    """For each run: seconds from the fault to the first step, seconds of each phase, and repeated steps."""

    total: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in PHASES})
    redone: list[int] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)


FAULTS = (
    Fault("node_crash", lambda c, n, _: c.crash(n), (2.5, 4.0)),
    Fault("power_loss", lambda c, n, _: c.power_off(n), (6.0, 8.0)),
    Fault("partition", lambda c, n, _: c.partition(n), (6.0, 8.0)),
    Fault("xid", lambda c, n, _: c.kmsg(n, FATAL_XID_LINE), (1.5, 2.5)),
    Fault("rank_killed", lambda _, __, t: t.kill_rank(3), (1.5, 2.5), runs_per_job=5),
    Fault("node0_crash", lambda c, n, _: c.crash(n), (3.0, 5.0), node0=True, runs_per_job=1),
    Fault("node0_power_loss", lambda c, n, _: c.power_off(n), (7.0, 9.0), node0=True, runs_per_job=1),
)
PLANNED = (Fault("precursor", lambda c, n, _: c.kmsg(n, PRECURSOR_XID_LINE), (3.0, 3.0)),)
"""What is measured only if --faults names it: nothing breaks, and the README's table does not have it."""
ALL = FAULTS + PLANNED


def measure(cluster: Cluster, fault: Fault, runs: int, say: Callable[[str], None]) -> Figures:
    """Injects `fault` `runs` times, in as many jobs as necessary. The cluster is restored before each job."""
    figures = Figures()
    while len(figures.total) < runs:
        cluster.restore_all()
        name = f"{fault.name}-{len(figures.total)}"
        with Training(cluster, TrainingSpec(name)) as training:
            training.submit()
            for _ in range(min(fault.runs_per_job, runs - len(figures.total))):
                measure_fault(cluster, training, fault, figures)
                say(f"{fault.name}: {figures.total[-1]:.2f} s, {figures.redone[-1]} steps done again")
            figures.step_s.append(training.step_s())
            training.cancel()
    return figures


def measure_fault(cluster: Cluster, training: Training, fault: Fault, figures: Figures) -> None:
    """Measures one fault: from a training gang to the next finished step."""
    began = int(training.view.get("step", 0))
    training.wait_step(began + 25)
    generation = training.generation
    node = training.node_of(0) if fault.node0 else training.node_of(3)
    at = fault.inject(cluster, node, training)
    recovery = training.wait_recovered(generation + 1)
    stamps = [at, *(float(recovery[key]) for key in ("detected_s", "fenced_s", "started_s", "first_step_s"))]
    figures.total.append(stamps[-1] - at)
    for phase, (begin, end) in zip(PHASES, pairwise(stamps), strict=True):
        figures.phases[phase].append(end - begin)
    training.wait_step(int(training.view["step"]) + 3)
    figures.redone.append(training.repeated_steps(generation + 1))


def table(results: dict[str, Figures]) -> Table:
    """All figures as a table."""
    shown = Table("fault", "median s", "worst s", "target s", *(f"{p} s" for p in PHASES), "steps done again", "step s")
    targets = {fault.name: fault.target_s for fault in ALL}
    for name, figures in results.items():
        shown.add_row(
            name,
            f"{statistics.median(figures.total):.2f}",
            f"{max(figures.total):.2f}",
            "{:.1f} / {:.1f}".format(*targets[name]),
            *(f"{statistics.median(figures.phases[p]):.2f}" for p in PHASES),
            str(max(figures.redone)),
            f"{statistics.median(figures.step_s):.3f}",
        )
    return shown


def summary(results: dict[str, Figures]) -> dict[str, Any]:
    """The JSON object of the last line."""
    out: dict[str, Any] = {
        name: {
            "median_s": round(statistics.median(figures.total), 3),
            "worst_s": round(max(figures.total), 3),
            "steps_redone": max(figures.redone),
            "phases_s": {p: round(statistics.median(v), 3) for p, v in figures.phases.items()},
        }
        for name, figures in results.items()
    }
    out["step_s"] = round(statistics.median([s for f in results.values() for s in f.step_s]), 4)
    return out


def measured(results: dict[str, Any], runs: int) -> dict[str, Any]:
    """`results` with when, where and how often they were measured: what benchmarks/recovery.json holds."""
    return {
        "measured": datetime.now(UTC).date().isoformat(),
        "machine": f"one machine with {os.cpu_count()} cores ({platform.machine()}); each node is a container on it",
        "source": "make bench-recovery",
        "runs": runs,
        "results": results,
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Time from a fault to the next finished step.")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--faults", nargs="+", choices=[f.name for f in ALL], default=[f.name for f in FAULTS])
    parser.add_argument("--cluster", help="use this running cluster instead of a new one")
    parser.add_argument("--suite", default="forky", choices=SUITES, help="Debian: Slurm 26.05 or 24.11")
    parser.add_argument("--no-peers", action="store_true", help="do not measure Slurm's requeue and torchrun")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    return parser.parse_args()


def main() -> int:
    """Measure, print, end the cluster that was started for it."""
    args = arguments()
    console = Console(stderr=True)
    cluster = Cluster.attach(args.cluster) if args.cluster else Cluster.up(ClusterSpec(nodes=10, suite=args.suite))
    results: dict[str, Figures] = {}
    peers: dict[str, Any] = {}
    try:
        for fault in (f for f in ALL if f.name in args.faults):
            results[fault.name] = measure(cluster, fault, args.runs, console.print)
        if not args.no_peers:
            from benchmarks.peers import measure_peers

            peers = measure_peers(cluster, args.runs, console.print)
    finally:
        if not args.cluster:
            cluster.down()
    Console(width=160).print(table(results))
    found = {**summary(results), "peers": peers}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(measured(found, args.runs), indent=2) + "\n")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
