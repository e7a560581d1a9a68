"""A real Prometheus of this host, which reads the metrics of a test cluster in the cluster's own network."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from muster.slurm.testcluster.cluster import CONTROLLER, LOGIN, Cluster
from muster.slurm.testcluster.spec import METRICS_NAME, METRICS_PORT
from muster.slurm.testcluster.waiting import WaitTimeout, wait_until

MONITORING = Path(__file__).resolve().parents[2] / "monitoring"
_PORT = 9090
_GET = """
import json, sys, urllib.error, urllib.request
for url in json.load(sys.stdin):
    try:
        print(urllib.request.urlopen(url).read().decode())
    except urllib.error.HTTPError as error:
        print(error.read().decode())
"""
"""Runs in the container: prints the answer to each URL, one a line."""


class Prometheus:
    """One that runs in the network of a cluster's login container. `ask` it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def get(self, path: str, *fields: Mapping[str, str]) -> list[Any]:
        """The data of the answers to one call for each of `fields`. A wrong expression is an error."""
        urls = [f"http://127.0.0.1:{_PORT}{path}?{urllib.parse.urlencode(one)}" for one in fields]
        said = self._cluster.exec(LOGIN, "python3", "-c", _GET, stdin=json.dumps(urls).encode()).stdout
        answers = [json.loads(line) for line in said.splitlines()]
        assert all(one["status"] == "success" for one in answers), [*zip(fields, answers, strict=True)]
        return [one["data"] for one in answers]

    def ask_all(self, expressions: Iterable[str]) -> list[dict[tuple[tuple[str, str], ...], float]]:
        """The values now of each expression, by their labels."""
        found = self.get("/api/v1/query", *({"query": one} for one in expressions))
        return [
            {tuple(sorted(one["metric"].items())): float(one["value"][1]) for one in answer["result"]}
            for answer in found
        ]

    def ask(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """The values now, by their labels."""
        return self.ask_all([expression])[0]

    def value(self, expression: str) -> float:
        """The sum of the values now; 0: there is none."""
        return sum(self.ask(expression).values())

    def wait_for(self, expression: str) -> None:
        """Wait until there is a value. An error has what went wrong in the newest scrapes."""
        try:
            wait_until(lambda: self.ask(expression), 60, f"Prometheus has {expression}")
        except WaitTimeout as error:
            (found,) = self.get("/api/v1/targets", {})
            said = {one["labels"]["instance"]: one["lastError"] for one in found["activeTargets"]}
            raise WaitTimeout(f"{error}; errors of scrapes: {said}") from None

    def exemplars(self, metric: str) -> list[dict[str, str]]:
        """The labels of all exemplars of a metric."""
        found = self.get("/api/v1/query_exemplars", {"query": metric, "start": "0", "end": "9e9"})[0]
        return [one["labels"] for series in found for one in series["exemplars"]]

    def answers(self) -> bool:
        """Whether it serves already."""
        return self._cluster.exec(LOGIN, "bash", "-c", f">/dev/tcp/127.0.0.1/{_PORT}", check=False).rc == 0


def _configuration(cluster: Cluster) -> dict[str, Any]:
    """The coordinator and each musterd are read every two seconds, with the rules of monitoring/."""
    proofs = cluster.folder / "cluster" / "metrics"
    targets = [
        {"targets": [f"{cluster.address(host)}:{METRICS_PORT}"], "labels": {"instance": host}}
        for host in (CONTROLLER, *cluster.nodes)
    ]
    return {
        "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
        "rule_files": [str(MONITORING / "rules.yml")],
        "scrape_configs": [
            {
                "job_name": "muster",
                "scheme": "https",
                "authorization": {"credentials_file": str(proofs / "token")},
                "tls_config": {"ca_file": str(proofs / "authority.pem"), "server_name": METRICS_NAME},
                "static_configs": targets,
            }
        ],
    }


@contextmanager
def prometheus(cluster: Cluster, folder: Path) -> Iterator[Prometheus]:
    """One that reads the metrics of `cluster`, and keeps them in `folder`."""
    program = shutil.which("prometheus")
    assert program, "the tests need Debian's prometheus: sh slurm/image/host-setup.sh"
    (folder / "prometheus.yml").write_text(yaml.safe_dump(_configuration(cluster)))
    command = cluster.network_argv(
        LOGIN, program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{_PORT}", "--enable-feature=exemplar-storage",
    )  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            found = Prometheus(cluster)
            wait_until(found.answers, 30, "Prometheus answers")
            yield found
        finally:
            process.terminate()
            process.wait()


def expressions() -> list[str]:
    """The query of each panel, and the expression of each recording rule."""
    panels = [
        target["expr"]
        for path in sorted((MONITORING / "dashboards").glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    ]
    return [*panels, *(rule["expr"] for rule in _rules() if "record" in rule)]


def alerts() -> list[str]:
    """The expression of each alert."""
    return [rule["expr"] for rule in _rules() if "alert" in rule]


def _rules() -> Sequence[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


MAY_BE_EMPTY = ("muster_gradient_norm", "muster_mfu", "muster_step_fetch", "muster_kernel_driver_lines")
"""What no rank of the example reports, job.toml does not say, or no driver has said."""


def each_expression_is_answered(found: Prometheus, job: int) -> None:
    """No expression of the dashboards and rules is wrong, and those of which there must be data are not empty."""
    asked = [one.replace("$job_id", str(job)).replace("$instance", ".*") for one in expressions()]
    answers = zip(asked, found.ask_all(asked), strict=True)
    for text, answer in answers:
        if not answer and not any(name in text for name in MAY_BE_EMPTY):
            found.wait_for(text)  # a rate needs two scrapes of a job that has just begun a generation
    found.ask_all(alerts())
    assert not found.ask('ALERTS{alertname="MusterCoordinatorDown"}')


def metrics_tell_of_a_throttle(found: Prometheus, job: int, generation: int, node: str) -> None:
    """The planned swap of `node`, from its own musterd and from the coordinator, and what the job has done."""
    found.wait_for(f'muster_generation{{job_id="{job}"}} >= {generation}')
    found.wait_for('muster_recovery_seconds_count{phase="first_step"}')
    found.wait_for(f'muster_node_signals_total{{instance="{node}",kind="gpu-throttle",code="64"}} == 1')
    assert found.value('muster_signals_total{kind="gpu-throttle",code="64"}') == 1
    assert found.value('muster_recoveries_total{cause="precursor",action="planned swap"}') == 1
    assert found.ask(f'muster_node_health{{node="{node}"}}')
    assert 0 < found.value(f'muster_job_goodput_ratio{{job_id="{job}"}}') < 1
    found.wait_for(f'muster_node_conditions{{instance="{node}",kind="gpu-throttle",code="64",gpu="2"}} == 1')
    found.wait_for(f'count(muster_rank_step{{job_id="{job}"}}) >= 3')
    found.wait_for(f'count(muster_rank_compute_seconds{{job_id="{job}"}} > 0) >= 3')
    newest = {"job_id": str(job), "generation": str(generation)}
    wait_until(lambda: newest in found.exemplars("muster_recovery_seconds_bucket"), 60, "the newest recovery is there")
    found.wait_for('muster_goodput_ratio{window="1d"}')
    found.wait_for("muster:nodes_out_of_service:ratio")
    each_expression_is_answered(found, job)
