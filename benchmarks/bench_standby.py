"""`make bench-standby`: how long nobody coordinates, where a standby takes over, on a cluster of containers.

A job trains meanwhile. For each way in which the coordinator that serves may go: seconds until a command is answered
again, and until every agent and node daemon of the job is heard by the other coordinator. The last line is a JSON
object: `{"killed": {"answers_median_s": …, "answers_worst_s": …, "heard_median_s": …, "heard_worst_s": …}, …}`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from muster.slurm.cluster.cluster import COORDINATOR, LOGIN, Cluster
from muster.slurm.cluster.spec import STANDBY, ClusterSpec
from muster.slurm.cluster.training import SLOW_STEPS, Training, TrainingSpec
from muster.slurm.cluster.waiting import wait_until

JOB = TrainingSpec("pair", nodes=3, spares=1, arguments=SLOW_STEPS)
LONGEST_S = 60.0


@dataclass(frozen=True)
class Fault:
    """`strike` takes the coordinator of a host away, `mend` brings it back as the one that stands by."""

    strike: Callable[[Cluster, str], object]
    mend: Callable[[Cluster, str], object]


@dataclass
class Seconds:
    """Of each run: until a command is answered, until all are heard."""

    answers: list[float] = field(default_factory=list)
    heard: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Medians and worst."""
        named = {"answers": self.answers, "heard": self.heard}
        return {
            f"{name}_{how}_s": round(of(values), 2)
            for name, values in named.items()
            for how, of in (("median", statistics.median), ("worst", max))
        }


def _start(cluster: Cluster, host: str) -> None:
    cluster.start_service(host, COORDINATOR)


def _boot(cluster: Cluster, host: str) -> None:
    cluster.start_node(host)
    cluster.heal(host)


FAULTS = {
    "stopped": Fault(lambda c, host: c.stop_service(host, COORDINATOR), _start),
    "killed": Fault(lambda c, host: c.kill_coordinator(host), _start),
    "frozen": Fault(
        lambda c, host: c.freeze_service(host, COORDINATOR), lambda c, host: c.thaw_service(host, COORDINATOR)
    ),
    "power_lost": Fault(lambda c, host: c.power_off(host), _boot),
}


def serving(cluster: Cluster) -> str:
    """The host whose coordinator has the lease."""
    holder = (cluster.shared / "muster" / "lease").read_text().split()[2]
    return holder.partition("|")[0]


def stands_by(cluster: Cluster, host: str) -> bool:
    """The newest thing that the host's coordinator has said is that it does."""
    last = cluster.sh(
        host, f"grep -o 'standing by\\|holds the lease, term' /var/log/muster/{COORDINATOR}.log | tail -n 1"
    )
    return last == "standing by"


def all_heard(cluster: Cluster, job: int) -> bool:
    """Every agent and node daemon of the job is attached."""
    said = cluster.exec(LOGIN, "muster", "status", "--json", str(job), user=JOB.user, check=False)
    nodes = json.loads(said.stdout).get("nodes", []) if said.rc == 0 else []
    return bool(nodes) and all(node.get("agent_attached") and node.get("musterd_attached") for node in nodes)


def hand_over(cluster: Cluster, training: Training, fault: Fault) -> tuple[float, float]:
    """Strike, and wait; both coordinators are there again afterwards."""
    host = serving(cluster)
    began = time.monotonic()
    fault.strike(cluster, host)
    # What has changed hands answers; what has not is still what was struck.
    wait_until(lambda: serving(cluster) not in (host, "-"), LONGEST_S, "the other one has the lease")
    wait_until(lambda: cluster.exec(LOGIN, "muster", "nodes", check=False).rc == 0, LONGEST_S, "commands are answered")
    answers = time.monotonic() - began
    wait_until(lambda: all_heard(cluster, training.job), LONGEST_S, "all are heard")
    heard = time.monotonic() - began
    fault.mend(cluster, host)
    wait_until(lambda: stands_by(cluster, host), LONGEST_S, f"{host} stands by")
    return answers, heard


def measure(cluster: Cluster, runs: int) -> dict[str, Seconds]:
    """All faults, `runs` times each."""
    found = {name: Seconds() for name in FAULTS}
    with Training(cluster, JOB) as training:
        training.submit()
        training.wait_step(10)
        for name, fault in FAULTS.items():
            for _ in range(runs):
                if name == "power_lost" and serving(cluster) != STANDBY:
                    hand_over(cluster, training, FAULTS["stopped"])  # the other host has slurmctld on it
                answers, heard = hand_over(cluster, training, fault)
                found[name].answers.append(answers)
                found[name].heard.append(heard)
        assert training.generation == 1, "the job was disturbed"
        training.cancel()
    return found


def table(found: dict[str, Seconds]) -> Table:
    """All figures for a person."""
    shown = Table("coordinator", "answers s, median", "worst", "all heard s, median", "worst")
    for name, seconds in found.items():
        shown.add_row(name, *(f"{value:.2f}" for value in seconds.summary().values()))
    return shown


def main() -> int:
    """Measure, print, end the cluster that was started for it."""
    parser = argparse.ArgumentParser(description="How long nobody coordinates, where a standby takes over.")
    parser.add_argument("--runs", type=int, default=3)
    runs: int = parser.parse_args().runs
    with Cluster.up(ClusterSpec(nodes=4, standby=True)) as cluster:
        found = measure(cluster, runs)
    Console(width=120).print(table(found))
    print(json.dumps({name: seconds.summary() for name, seconds in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
