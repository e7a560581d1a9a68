"""`make bench-cli`: how long the commands of users take on a login node.

    python -m benchmarks.bench_cli [--rounds N]

Each round runs each command once on the login container of a test cluster: help and version; a submission of a
job.toml and one of a user's own script, beside sbatch with the same script; a status; a Python that does nothing, and
one that only imports gRPC. The times are taken inside the container. The last line is a JSON object with medians in
milliseconds. `submit_over_floor_ms` and `script_over_floor_ms` are a submission less the floor and less sbatch,
`status_over_floor_ms` is a status less the floor. The floor is that bare import. `script_over_python_ms` is a
submission of the user's script less the start of Python and less sbatch.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence

from muster.slurm.testcluster.cluster import Cluster
from muster.slurm.testcluster.spec import LOGIN, ClusterSpec
from muster.slurm.testcluster.training import SLOW_STEPS, Training, TrainingSpec

FOLDER = "/shared/cli"
JOB = f"""
name = "cli"
nodes = 1
command = ["true"]
run_dir = "{FOLDER}/run"
slurm.options = ["--hold"]
"""
OWN_SCRIPT = """#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=1 --hold --chdir=/shared/cli
srun torchrun --nproc-per-node=1 train.py
"""
TIMED = """
import json, subprocess, sys, time
rounds, commands = json.loads(sys.argv[1])
found = {name: [] for name in commands}
for number in range(rounds + 1):
    for name, command in commands.items():
        began = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        if number:  # the first round fills the caches
            found[name].append(1000 * (time.perf_counter() - began))
print(json.dumps(found))
"""


def measure(cluster: Cluster, commands: Mapping[str, Sequence[str]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each command in each round."""
    words = ("python3", "-c", TIMED, json.dumps([rounds, commands]))
    found: dict[str, list[float]] = json.loads(cluster.exec(LOGIN, *words, user="alice").stdout)
    return found


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with (
        Cluster.up(ClusterSpec(nodes=4)) as cluster,
        Training(cluster, TrainingSpec("running", nodes=2, spares=1, arguments=SLOW_STEPS)) as training,
    ):
        training.submit()
        training.wait_step(3)
        cluster.sh(LOGIN, f"mkdir -p {FOLDER}; cat >{FOLDER}/job.toml <<'EOF'\n{JOB}\nEOF", user="alice")
        script, own = f"{FOLDER}/job.sbatch", f"{FOLDER}/own.sbatch"
        cluster.sh(LOGIN, f"cat >{own} <<'EOF'\n{OWN_SCRIPT}EOF", user="alice")
        cluster.sh(LOGIN, f"muster submit --dry-run {FOLDER}/job.toml >{script}", user="alice")
        commands = {
            "python": ("python3", "-c", "pass"),
            "floor": ("python3", "-c", "import grpc"),
            "help": ("muster", "--help"),
            "version": ("muster", "--version"),
            "sbatch": ("sbatch", script),
            "submit": ("muster", "submit", f"{FOLDER}/job.toml"),
            "own_sbatch": ("sbatch", own),
            "script": ("muster", "submit", own),
            "status": ("muster", "status", str(training.job)),
        }
        times = measure(cluster, commands, rounds)
        cluster.sh(LOGIN, "scancel --user=alice", user="alice")
    median = {name: statistics.median(found) for name, found in times.items()}
    print(json.dumps({f"{name}_worst_ms": round(max(found), 1) for name, found in times.items()}))
    figures = {
        "help_ms": median["help"],
        "version_ms": median["version"],
        "submit_over_floor_ms": median["submit"] - median["floor"] - median["sbatch"],
        "script_over_floor_ms": median["script"] - median["floor"] - median["own_sbatch"],
        "script_over_python_ms": median["script"] - median["python"] - median["own_sbatch"],
        "status_over_floor_ms": median["status"] - median["floor"],
        **{f"{name}_ms": median[name] for name in times if name not in ("help", "version")},
    }
    print(json.dumps({name: round(value, 1) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
