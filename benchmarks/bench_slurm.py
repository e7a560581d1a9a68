"""`make bench-slurm`: measures each call of the Slurm client, with each backend, on a cluster of containers.

If a requeue or a drain took seconds, a recovery would take seconds. The last output line is a JSON object: the median
milliseconds of each call, by backend.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from muster.slurm.image.recipe import SUITES, Recipe
from muster.slurm.testcluster.cluster import CONTROLLER, Cluster
from muster.slurm.testcluster.spec import ClusterSpec

CONTRACT = Path(__file__).resolve().parents[1] / "tests" / "contract"
USER = "alice"
TIMEOUT_S = 600.0
"""Seconds for all rounds with one backend."""

Costs = dict[str, float]
"""Milliseconds by the name of a call."""


def measure(cluster: Cluster, backend: str, rounds: int) -> Costs:
    """Medians of `rounds` rounds with one backend."""
    target = cluster.shared / "contract"
    shutil.copytree(CONTRACT, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    script = "/shared/contract/measure_slurm_calls.py"
    result = cluster.exec(CONTROLLER, "python3", script, backend, USER, str(rounds), timeout=TIMEOUT_S)
    costs: Costs = json.loads(result.stdout)
    return costs


def table(costs: dict[str, Costs]) -> Table:
    """All figures as a table."""
    shown = Table("call", *(f"{backend} ms" for backend in costs))
    for call in next(iter(costs.values())):
        shown.add_row(call, *(f"{each[call]:.1f}" for each in costs.values()))
    return shown


def main() -> int:
    """Measures, prints, and removes the cluster."""
    parser = argparse.ArgumentParser(description="Measures each call of the Slurm client.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--suite", default="forky", choices=SUITES, help="Debian: Slurm 26.05 or 24.11")
    args = parser.parse_args()
    backends = ("pyslurm", "cli") if Recipe.of(args.suite).pyslurm else ("cli",)
    with Cluster.up(ClusterSpec(nodes=4, suite=args.suite)) as cluster:
        costs = {backend: measure(cluster, backend, args.rounds) for backend in backends}
    Console(width=120).print(table(costs))
    print(json.dumps(costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
