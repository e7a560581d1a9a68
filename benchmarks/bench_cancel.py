"""`make bench-cancel`: how long `muster cancel` takes to free everything, on a cluster of containers.

A job of 8 ranks and 2 spares trains on 10 nodes, and its user calls `muster cancel`. The clock starts with that call.
It stops when no process of the user's and no memory file of Muster's is left on any node, and the controller's
`squeue` is empty: a job that is COMPLETING is still there. What is left is looked at from outside the nodes, every
tenth of a second or two.

The ranks rest after each step, so that the command and the daemons do not queue behind ten nodes' work on the
processors of one machine; `--pause 0` measures that as well. The last line is a JSON object: `{"median_s": …,
"worst_s": …, "parts_s": {"command": …, "processes": …, "memory": …, "queue": …}}`, the parts as medians of when each
was done.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from muster.slurm.cluster.cluster import LOGIN, Cluster
from muster.slurm.cluster.leftovers import find_leftovers, queued_jobs
from muster.slurm.cluster.spec import ClusterSpec
from muster.slurm.cluster.training import Training, TrainingSpec
from muster.slurm.cluster.waiting import WaitTimeout

PROMISED_S = 5.0
LONGEST_S = 120.0
LOOK_EVERY_S = 0.05
WARM_STEPS = 20

PARTS = {
    "command": "command has returned s",
    "processes": "no process s",
    "memory": "no memory s",
    "queued_jobs": "queue empty s",
}
Run = dict[str, float]
"""Seconds from the start of the call until each part was done."""


def cancel_once(cluster: Cluster, name: str, pause_s: float) -> Run:
    """Train, cancel, and look until nothing is left."""
    with Training(cluster, TrainingSpec(name, arguments=("--pause", str(pause_s)))) as training:
        training.submit()
        training.wait_step(WARM_STEPS)
        seen = find_leftovers(cluster)
        assert all((seen.processes, seen.memory, queued_jobs(cluster))), "what is to go can't be seen"
        words = ("muster", "cancel", str(training.job))
        began = time.monotonic()
        command = cluster.popen(LOGIN, *words, user=training.spec.user)
        run = until_all_gone(cluster, command, began)
        said = command.communicate()[0]
        assert command.returncode == 0, said
    return run


def until_all_gone(cluster: Cluster, command: subprocess.Popen[str], began: float) -> Run:
    """When each part was done, as of the first of the looks that all found it so; `began`: the call's start."""
    run: Run = {}
    while len(run) < len(PARTS):
        for part, there in present(cluster, command):
            if there:
                run.pop(part, None)
            else:
                run.setdefault(part, time.monotonic() - began)
        if time.monotonic() - began > LONGEST_S:
            raise WaitTimeout(f"not within {LONGEST_S:.0f} s: {', '.join(sorted(PARTS.keys() - run))}")
        time.sleep(LOOK_EVERY_S)
    return run


def present(cluster: Cluster, command: subprocess.Popen[str]) -> Iterator[tuple[str, bool]]:
    """Each part, as it is looked at: whether it is still to be done."""
    yield "command", command.poll() is None
    left = find_leftovers(cluster)
    yield "processes", bool(left.processes)
    yield "memory", bool(left.memory)
    yield "queued_jobs", bool(queued_jobs(cluster))


def summary(runs: list[Run]) -> dict[str, Any]:
    """The object of the last line."""
    totals = [max(run.values()) for run in runs]
    return {
        "median_s": round(statistics.median(totals), 2),
        "worst_s": round(max(totals), 2),
        "parts_s": {part: round(statistics.median(run[part] for run in runs), 2) for part in PARTS},
    }


def table(runs: list[Run]) -> Table:
    """All figures for a person."""
    shown = Table("run", "all s", *PARTS.values())
    for number, run in enumerate(runs, 1):
        columns = (max(run.values()), *(run[part] for part in PARTS))
        shown.add_row(str(number), *(f"{seconds:.2f}" for seconds in columns))
    return shown


def main() -> int:
    """Measure, print, end the cluster that was started for it."""
    parser = argparse.ArgumentParser(description="How long `muster cancel` takes to free everything.")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.5, metavar="SECONDS", help="a rank rests after each step")
    args = parser.parse_args()
    with Cluster.up(ClusterSpec(nodes=10)) as cluster:
        runs = [cancel_once(cluster, f"cancel-{number}", args.pause) for number in range(args.runs)]
    console = Console(width=120)
    console.print(table(runs))
    console.print(f"promised: {PROMISED_S:.0f} s; kept in {sum(max(r.values()) <= PROMISED_S for r in runs)} runs")
    print(json.dumps(summary(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
