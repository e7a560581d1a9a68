"""`make bench-start`: from the call of the command that submits to the first finished optimizer step.

    python -m benchmarks.bench_start [--rounds N] [--sizes NODES+SPARES ...] [--ways WAY ...]

Each round starts the same training (first_step.py, one rank on each node) once in each way, in another order each time:
with a batch script and sbatch, with the same script and `muster submit`, and with a job.toml. One script has
`srun torchrun`, another one `srun python`. Muster's jobs also wait for their spares. All of them run on one cluster of
containers, and share this host's clock.

A phase begins where the one before it ends. It ends

    submit    when Slurm has the job
    queue     when Slurm has chosen its nodes
    prolog    when slurmd starts the batch script
    shell     when a slurmd first starts a task of the launch
    agent     when the last agent has attached, as the coordinator has it; without Muster: when the last rank begins
    gather    when the coordinator starts the first generation
    start     when the last rank begins
    imports   when the last rank has imported what the script imports
    group     when the last rank is in the process group
    step      when the last rank has finished its first step

The output is a table of medians for each size. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
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

from benchmarks.peers.job import write_torchrun
from benchmarks.peers.peer import with_plain_python, with_plain_torchrun
from muster.slurm.testcluster.cluster import CONTROLLER, LOGIN, Cluster
from muster.slurm.testcluster.spec import ClusterSpec
from muster.slurm.testcluster.waiting import wait_until

HERE = Path(__file__).resolve().parent
TRAIN = "first_step.py"
USER = "alice"
PHASES = ("submit", "queue", "prolog", "shell", "agent", "gather", "start", "imports", "group", "step")
GOAL_S = 1.0
"""Seconds above the same program without Muster."""
JOB = """name = "start"
nodes = {nodes}
spares = {spares}
command = ["python3", "{train}"]
work_dir = "{folder}"
run_dir = "{folder}"
"""
_MUSTER = "muster submit --parsable --spares={spares} "
WAYS = {
    "torchrun": "sbatch --parsable train.sbatch",
    "muster, torchrun": _MUSTER + "train.sbatch",
    "python": "sbatch --parsable python.sbatch",
    "muster, python": _MUSTER + "python.sbatch",
    "muster, job.toml": "muster submit job.toml",
}
"""The command that submits, for each way."""
WITHOUT_MUSTER = {"muster, torchrun": "torchrun", "muster, python": "python", "muster, job.toml": "torchrun"}


@dataclass(frozen=True)
class Size:
    """Nodes that train, and spares."""

    nodes: int
    spares: int

    @staticmethod
    def parse(text: str) -> Size:
        """ "8+2"."""
        nodes, _, spares = text.partition("+")
        return Size(int(nodes), int(spares or 0))

    def __str__(self) -> str:
        return f"{self.nodes} + {self.spares}"


@dataclass
class Figures:
    """Seconds of each run of one way: in all, and of each phase that the way has."""

    total: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})

    def add(self, stamps: dict[str, float]) -> None:
        """`stamps`: when each phase has ended; "" is the beginning."""
        there = ["", *(phase for phase in PHASES if phase in stamps)]
        for before, phase in pairwise(there):
            self.phases[phase].append(stamps[phase] - stamps[before])
        self.total.append(stamps[PHASES[-1]] - stamps[""])


def measure(cluster: Cluster, size: Size, way: str, name: str) -> dict[str, float]:
    """Runs one job to its end, in a folder `name`. Returns when each phase has ended; "" is the beginning."""
    folder, inside = cluster.shared / "start" / name, f"/shared/start/{name}"
    lay_out(folder, size, "./torchrun" if way == "torchrun" else "torchrun")
    cluster.sh(LOGIN, f"chown -R {USER}: {inside}")
    submit = WAYS[way].format(spares=size.spares)
    began, job = cluster.sh(LOGIN, f"cd {inside} && date +%s.%N && {submit} 2>notes", user=USER).split()[:2]
    wait_until(lambda: len(marks(folder)) == size.nodes, 120, f"the first step of {name}")
    wait_until(lambda: not cluster.sh(CONTROLLER, "squeue -h"), 60, f"the end of {name}")
    stamps = {"": float(began), **slurm_stamps(cluster, int(job))}
    of_ranks = ["start" if way in WITHOUT_MUSTER else "agent", "imports", "group", "step"]
    if way in WITHOUT_MUSTER:
        stamps |= coordinator_stamps(cluster, int(job))
    return stamps | {phase: max(times) for phase, times in zip(of_ranks, zip(*marks(folder), strict=True), strict=True)}


def lay_out(folder: Path, size: Size, torchrun: str) -> None:
    """The user's files. Muster gets PyTorch's own program: it opens no store there, which this PyTorch can't do."""
    folder.mkdir(parents=True)
    shutil.copy(HERE / TRAIN, folder)
    shutil.copy(HERE / "peers" / "no_libuv.py", folder)
    write_torchrun(folder)
    (folder / "python.sbatch").write_text(with_plain_python(size.nodes, TRAIN))
    (folder / "train.sbatch").write_text(with_plain_torchrun(size.nodes, TRAIN, torchrun))
    text = JOB.format(nodes=size.nodes, spares=size.spares, folder=f"/shared/start/{folder.name}", train=TRAIN)
    (folder / "job.toml").write_text(text)


def marks(folder: Path) -> list[list[float]]:
    """What the ranks have written."""
    file = folder / "marks"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [[float(word) for word in line.split()] for line in lines]


def slurm_stamps(cluster: Cluster, job: int) -> dict[str, float]:
    """What Slurm's logs say of a job, to the millisecond."""
    of_controller = cluster.logs(CONTROLLER, "slurmctld")
    of_nodes = "\n".join(cluster.logs(node, "slurmd") for node in cluster.nodes)
    return {
        "submit": stamp(of_controller, rf"_slurm_rpc_submit_batch_job: JobId={job}\b"),
        "queue": stamp(of_controller, rf"sched.*: Allocate JobId={job}\b"),
        "prolog": stamp(of_nodes, rf"Launching batch JobId={job}\b"),
        "shell": stamp(of_nodes, rf"launch task StepId={job}\.0\b"),
    }


def stamp(log: str, words: str) -> float:
    """The time of the first line with `words`."""
    times = [line[1:24] for line in log.splitlines() if re.search(words, line)]
    if not times:
        raise LookupError(f"no line of Slurm's logs has {words!r}")
    return min(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() for text in times)


def coordinator_stamps(cluster: Cluster, job: int) -> dict[str, float]:
    """What the coordinator has written into its journal."""
    lines = cluster.muster(LOGIN, "events", "--json", str(job), user=USER).splitlines()
    events = [json.loads(line) for line in lines]
    at = {
        name: [float(e["at_s"]) for e in events if e["name"] == name] for name in ("MemberJoined", "GenerationStarted")
    }
    started = at["GenerationStarted"][0]
    return {"agent": max(joined for joined in at["MemberJoined"] if joined <= started), "gather": started}


def above(way: str, found: dict[str, Figures]) -> float | None:
    """Seconds above the way without Muster: the median over the rounds, without the queue, which ends at a full second
    of Slurm. None: that way was not measured, or is this one."""
    if (bare := found.get(WITHOUT_MUSTER.get(way, ""))) is None:
        return None
    own, other = ([t - q for t, q in zip(f.total, f.phases["queue"], strict=True)] for f in (found[way], bare))
    return round(statistics.median(a - b for a, b in zip(own, other, strict=True)), 2)


def table(size: Size, found: dict[str, Figures]) -> Table:
    """All figures of one size as a table."""
    shown = Table(f"{size} nodes", "median s", "worst s", "without Muster", *PHASES)
    for way, figures in found.items():
        shown.add_row(
            way,
            f"{statistics.median(figures.total):.2f}",
            f"{max(figures.total):.2f}",
            f"{found_above:+.2f}" if (found_above := above(way, found)) is not None else "",
            *(f"{statistics.median(seconds):.2f}" if seconds else "" for seconds in figures.phases.values()),
        )
    return shown


def summary(found: dict[str, Figures]) -> dict[str, Any]:
    """The figures of one size, for the JSON object of the last line."""
    return {
        way: {
            "median_s": round(statistics.median(figures.total), 2),
            "worst_s": round(max(figures.total), 2),
            "above_without_muster_s": above(way, found),
            "phases_s": {phase: round(statistics.median(s), 2) for phase, s in figures.phases.items() if s},
        }
        for way, figures in found.items()
    }


def measure_size(
    cluster: Cluster, size: Size, ways: list[str], rounds: int, say: Callable[[str], None]
) -> dict[str, Figures]:
    """All ways in turn, `rounds` times. A round before the first one fills the caches."""
    found = {way: Figures() for way in ways}
    for number in range(rounds + 1):
        for place in range(len(ways)):
            way = ways[(place + number) % len(ways)]
            stamps = measure(cluster, size, way, f"{size}-{number}-{place}".replace(" ", ""))
            if number:
                found[way].add(stamps)
                say(f"{size}, {way}: {found[way].total[-1]:.2f} s")
    return found


def main() -> int:
    """Measure, print, end the cluster that was started for it."""
    parser = argparse.ArgumentParser(description="Time from the submission to the first step.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", type=Size.parse, default=[Size(2, 1), Size(8, 2)], metavar="N+S")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    args = parser.parse_args()
    found: dict[str, dict[str, Figures]] = {}
    with Cluster.up(ClusterSpec(nodes=max(size.nodes + size.spares for size in args.sizes))) as cluster:
        for size in args.sizes:
            found[str(size)] = measure_size(cluster, size, args.ways, args.rounds, Console(stderr=True).print)
            Console(width=160).print(table(size, found[str(size)]))
    print(f"goal: at most {GOAL_S:.1f} s above the same program without Muster")
    print(json.dumps({size: summary(figures) for size, figures in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
