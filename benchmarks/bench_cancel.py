"""`make bench-cancel`: measures how long `muster cancel` takes to free all resources, on a cluster of containers.

A job with 8 ranks and 2 spares trains on 10 nodes. Its user calls `muster cancel`. The clock starts with that call. It
stops when no process of the user and no memory file of Muster remains on any node, and `squeue` on the controller is
empty. A COMPLETING job still counts. The check runs outside the nodes, every one or two tenths of a second.

The ranks sleep after each step. Otherwise the command and the daemons would wait for the processors of one host, which
run ten nodes' work. `--pause 0` measures that case. The last output line is a JSON object: `{"median_s": …, "worst_s":
…, "parts_s": {"command": …, "processes": …, "memory": …, "queue": …}}`. Each part is the median time at which that part
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

from muster.slurm.testcluster.cluster import LOGIN, Cluster
from muster.slurm.testcluster.leftovers import find_leftovers, queued_jobs
from muster.slurm.testcluster.spec import ClusterSpec
from muster.slurm.testcluster.training import Training, TrainingSpec
from muster.slurm.testcluster.waiting import WaitTimeout

TARGET_S = 5.0
"""Seconds: Muster's promise for the worst case."""
TIMEOUT_S = 120.0
"""Seconds after which the measurement gives up."""
POLL_S = 0.05
"""Seconds between two checks; a check itself takes about a tenth of a second."""
WARM_STEPS = 20
"""Steps that the job trains before the cancel."""

PARTS = {
    "command": "command has returned s",
    "processes": "no process s",
    "memory": "no memory s",
    "queue": "queue empty s",
}
Run = dict[str, float]
"""Seconds from the start of the call until each part was done."""


def measure_cancel(cluster: Cluster, name: str, pause_s: float) -> Run:
    """Trains, cancels, and waits until nothing remains."""
    with Training(cluster, TrainingSpec(name, arguments=("--pause", str(pause_s)))) as training:
        training.submit()
        training.wait_step(WARM_STEPS)
        found = find_leftovers(cluster)
        assert all((found.processes, found.memory, queued_jobs(cluster))), "the check does not see the job's resources"
        words = ("muster", "cancel", str(training.job))
        began = time.monotonic()
        command = cluster.popen(LOGIN, *words, user=training.spec.user)
        run = wait_all_done(cluster, command, began)
        output = command.communicate()[0]
        assert command.returncode == 0, output
    return run


def wait_all_done(cluster: Cluster, command: subprocess.Popen[str], began: float) -> Run:
    """Waits until all parts are done. Returns when each part was done, as of the first of the consecutive checks that
    found it done. `began` is the start of the call.
    """
    run: Run = {}
    while len(run) < len(PARTS):
        for part, remaining in remaining_parts(cluster, command):
            if remaining:
                run.pop(part, None)
            else:
                run.setdefault(part, time.monotonic() - began)
        if time.monotonic() - began > TIMEOUT_S:
            raise WaitTimeout(f"not within {TIMEOUT_S:.0f} s: {', '.join(sorted(PARTS.keys() - run))}")
        time.sleep(POLL_S)
    return run


def remaining_parts(cluster: Cluster, command: subprocess.Popen[str]) -> Iterator[tuple[str, bool]]:
    """Yields each part as it is checked, and whether it is not done yet."""
    yield "command", command.poll() is None
    left = find_leftovers(cluster)
    yield "processes", bool(left.processes)
    yield "memory", bool(left.memory)
    yield "queue", bool(queued_jobs(cluster))


def summary(runs: list[Run]) -> dict[str, Any]:
    """The JSON object of the last line."""
    totals = [max(run.values()) for run in runs]
    return {
        "median_s": round(statistics.median(totals), 2),
        "worst_s": round(max(totals), 2),
        "parts_s": {part: round(statistics.median(run[part] for run in runs), 2) for part in PARTS},
    }


def table(runs: list[Run]) -> Table:
    """All figures as a table."""
    shown = Table("run", "all s", *PARTS.values())
    for number, run in enumerate(runs, 1):
        columns = (max(run.values()), *(run[part] for part in PARTS))
        shown.add_row(str(number), *(f"{seconds:.2f}" for seconds in columns))
    return shown


def main() -> int:
    """Measures, prints, and removes the cluster."""
    parser = argparse.ArgumentParser(description="How long `muster cancel` takes to free everything.")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--pause", type=float, default=0.5, metavar="SECONDS", help="each rank sleeps so long after a step"
    )
    args = parser.parse_args()
    with Cluster.up(ClusterSpec(nodes=10)) as cluster:
        runs = [measure_cancel(cluster, f"cancel-{number}", args.pause) for number in range(args.runs)]
    console = Console(width=120)
    console.print(table(runs))
    console.print(f"target: {TARGET_S:.0f} s; met in {sum(max(r.values()) <= TARGET_S for r in runs)} runs")
    print(json.dumps(summary(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
