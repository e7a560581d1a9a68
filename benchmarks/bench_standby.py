"""`make bench-standby`: measures a takeover by the standby coordinator, on a cluster of containers.

A job trains during the measurement. For each way to lose the leader, two times are measured: seconds until a command is
answered again, and seconds until every agent and node daemon of the job is connected to the other coordinator. The last
output line is a JSON object: `{"killed": {"answers_median_s": …, "answers_worst_s": …, "heard_median_s": …,
"heard_worst_s": …}, …}`.
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

from muster.slurm.testcluster.cluster import COORDINATOR, LOGIN, Cluster
from muster.slurm.testcluster.spec import STANDBY, ClusterSpec
from muster.slurm.testcluster.training import SLOW_STEPS, Training, TrainingSpec
from muster.slurm.testcluster.waiting import wait_until

JOB = TrainingSpec("pair", nodes=3, spares=1, arguments=SLOW_STEPS)
TIMEOUT_S = 60.0
"""Seconds after which the measurement gives up."""


@dataclass(frozen=True)
class Fault:
    """`inject` stops the coordinator of a host. `repair` starts it again as the standby."""

    inject: Callable[[Cluster, str], object]
    repair: Callable[[Cluster, str], object]


@dataclass
class Seconds:
    """For each run: seconds until a command is answered, and until all agents and daemons are connected."""

    answers: list[float] = field(default_factory=list)
    heard: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Medians and worst values."""
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
    "frozen": Fault(Cluster.freeze_coordinator, Cluster.thaw_coordinator),
    "power_lost": Fault(lambda c, host: c.power_off(host), _boot),
}


def lease_host(cluster: Cluster) -> str:
    """The host whose coordinator holds the lease."""
    holder = (cluster.shared / "muster" / "lease").read_text().split()[2]
    return holder.partition("|")[0]


def is_standby(cluster: Cluster, host: str) -> bool:
    """Whether the newest message in the log of the host's coordinator says that it is the standby."""
    last = cluster.sh(
        host, f"grep -o 'standing by\\|holds the lease, term' /var/log/muster/{COORDINATOR}.log | tail -n 1"
    )
    return last == "standing by"


def all_heard(cluster: Cluster, job: int) -> bool:
    """Whether every agent and node daemon of the job is connected."""
    result = cluster.exec(LOGIN, "muster", "status", "--json", str(job), user=JOB.user, check=False)
    nodes = json.loads(result.stdout).get("nodes", []) if result.rc == 0 else []
    return bool(nodes) and all(node.get("agent_attached") and node.get("musterd_attached") for node in nodes)


def measure_failover(cluster: Cluster, training: Training, fault: Fault) -> tuple[float, float]:
    """Injects the fault and waits for the takeover. Afterwards both coordinators run again."""
    host = lease_host(cluster)
    began = time.monotonic()
    fault.inject(cluster, host)
    # Wait for the lease first: until then, an answer may come from the old leader.
    wait_until(lambda: lease_host(cluster) not in (host, "-"), TIMEOUT_S, "the standby holds the lease")
    wait_until(lambda: cluster.exec(LOGIN, "muster", "nodes", check=False).rc == 0, TIMEOUT_S, "commands are answered")
    answers = time.monotonic() - began
    wait_until(lambda: all_heard(cluster, training.job), TIMEOUT_S, "all agents and daemons are connected")
    heard = time.monotonic() - began
    fault.repair(cluster, host)
    wait_until(lambda: is_standby(cluster, host), TIMEOUT_S, f"{host} stands by")
    return answers, heard


def measure(cluster: Cluster, runs: int) -> dict[str, Seconds]:
    """All faults, `runs` times each."""
    found = {name: Seconds() for name in FAULTS}
    with Training(cluster, JOB) as training:
        training.submit()
        training.wait_step(10)
        for name, fault in FAULTS.items():
            for _ in range(runs):
                if name == "power_lost" and lease_host(cluster) != STANDBY:
                    measure_failover(cluster, training, FAULTS["stopped"])  # the other host runs slurmctld
                answers, heard = measure_failover(cluster, training, fault)
                found[name].answers.append(answers)
                found[name].heard.append(heard)
        assert training.generation == 1, "the job was disturbed"
        training.cancel()
    return found


def table(found: dict[str, Seconds]) -> Table:
    """All figures as a table."""
    shown = Table("coordinator", "answers s, median", "worst", "all heard s, median", "worst")
    for name, seconds in found.items():
        shown.add_row(name, *(f"{value:.2f}" for value in seconds.summary().values()))
    return shown


def main() -> int:
    """Measures, prints, and removes the cluster."""
    parser = argparse.ArgumentParser(description="Measures a takeover by the standby coordinator.")
    parser.add_argument("--runs", type=int, default=3)
    runs: int = parser.parse_args().runs
    with Cluster.up(ClusterSpec(nodes=4, standby=True)) as cluster:
        found = measure(cluster, runs)
    Console(width=120).print(table(found))
    print(json.dumps({name: seconds.summary() for name, seconds in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
