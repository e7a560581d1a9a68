"""A real Prometheus reads the metrics of a coordinator: a recovery, a throttle and goodput are in what it answers."""

from __future__ import annotations

import asyncio
import http.client
import json
import secrets
import shutil
import socket
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import yaml

from muster.daemon.coordinator.core.state import facts
from muster.daemon.host import private_file
from muster.daemon.metrics.metrics_access import MetricsAccess
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld
from muster.daemon.transport.site_config import Site
from muster.slurm.testcluster.waiting import wait_until

MONITORING = Path(__file__).resolve().parents[2] / "monitoring"
OF_NODES = ("muster_node_signals", "muster_signals_waiting", "muster_kernel_lines", "muster_coordinator_answer",
            "muster_rank_step", "muster_node_checkpoint", "muster_kept_memory")  # fmt: skip
"""What musterd serves. There is none here."""
MAY_BE_EMPTY = ("muster_loss", "muster_gradient_norm", "muster_mfu", "muster_tokens", "muster_checkpoint", "fetch",
                "compute", "step_wait", "muster_step_seconds", *OF_NODES)  # fmt: skip
"""What a job says only if its script does, or after a while."""


class Prometheus:
    """One that runs on this host. `ask` it."""

    def __init__(self, port: int) -> None:
        self._port = port

    def get(self, path: str, **fields: str) -> Any:
        """The data of an answer. A wrong expression is an error."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        with closing(connection):
            connection.request("GET", f"{path}?{urllib.parse.urlencode(fields)}")
            said = json.loads(connection.getresponse().read())
        assert said["status"] == "success", f"{fields}: {said}"
        return said["data"]

    def ask(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """The values now, by their labels."""
        found = self.get("/api/v1/query", query=expression)["result"]
        return {tuple(sorted(one["metric"].items())): float(one["value"][1]) for one in found}

    def value(self, expression: str) -> float:
        """The sum of the values now; 0: there is none."""
        return sum(self.ask(expression).values())

    def answers(self) -> bool:
        """Whether it serves already."""
        try:
            return bool(self.get("/api/v1/status/buildinfo"))
        except (OSError, http.client.HTTPException, ValueError):
            return False


def free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


def site(folder: Path) -> Site:
    """Metrics on all addresses: with TLS and a token. The coordinator itself is in plain text."""
    pki = folder / "pki"
    subprocess.run([sys.executable, "-m", "muster.launcher", "pki", "init", str(pki), "ctl"], check=True)
    private_file.create(folder / "metrics.token", secrets.token_hex(16))
    return Site(
        metrics_listen="0.0.0.0:0",
        metrics_token=folder / "metrics.token",
        tls_certificate=pki / "ctl/coordinator.pem",
        tls_key=pki / "ctl/coordinator.key",
    )


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[Prometheus]:
    """One that reads the metrics at port `target` every two seconds, with the rules of monitoring/."""
    program, port = shutil.which("prometheus"), free_port()
    assert program, "the tests need Debian's prometheus: sh slurm/image/host-setup.sh"
    config = {
        "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
        "rule_files": [str(MONITORING / "rules.yml")],
        "scrape_configs": [
            {
                "job_name": "muster",
                "scheme": "https",
                "authorization": {"credentials_file": str(folder / "metrics.token")},
                "tls_config": {"ca_file": str(folder / "pki/authority.pem"), "server_name": "ctl"},
                "static_configs": [{"targets": [f"127.0.0.1:{target}"]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage",
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            found = Prometheus(port)
            wait_until(found.answers, 30, "Prometheus answers")
            yield found
        finally:
            process.terminate()
            process.wait()


def expressions() -> list[str]:
    """The query of each panel, and the expression of each rule."""
    panels = [
        target["expr"]
        for path in sorted((MONITORING / "dashboards").glob("*.json"))
        for panel in json.loads(path.read_text())["panels"]
        for target in panel["targets"]
    ]
    groups = yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"]
    return [*panels, *(rule["expr"] for group in groups for rule in group["rules"] if "record" in rule)]


def alerts() -> list[str]:
    groups = yaml.safe_load((MONITORING / "rules.yml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"] if "alert" in rule]


async def test_a_real_prometheus_finds_a_recovery_a_throttle_and_the_goodput(tmp_path: Path) -> None:
    world = ScriptedWorld.create(tmp_path)
    world.settings["metrics"] = MetricsAccess.of_site(site(tmp_path))
    await world.start_coordinator()
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    await world.agents["n1"].step(8)
    port = (await world.running_coordinator()).metrics_port
    with prometheus(tmp_path, port) as found:
        await asyncio.to_thread(wait_until, lambda: found.ask("muster_step"), 60, "Prometheus has read the job")
        for name in ("n1", "n2"):
            await world.agents[name].report_shards(1, 5, [0, 1])
        await world.send_signal("n3", 64, "gpu-throttle")
        await world.send_signal("n2", 79)
        await world.wait_for_duty("RUN 2", ["n1", "n3"])
        await world.agents["n1"].step()
        await world.wait_for_facts(facts.FirstStep, 2)
        await asyncio.to_thread(all_is_found, found)
    await world.close()


def all_is_found(found: Prometheus) -> None:
    """What has happened is in what Prometheus answers."""
    stepped = lambda: found.value('muster_recovery_seconds_count{phase="first_step"}') == 1  # noqa: E731
    wait_until(stepped, 60, "Prometheus has read the recovery")
    assert found.value('muster_recoveries_total{cause="node",action="swap"}') == 1
    assert found.value("muster_steps_repeated_total") == 3
    assert found.value("muster_generation") == 2
    exemplars = found.get("/api/v1/query_exemplars", query="muster_recovery_seconds_bucket", start="0", end="9e9")
    assert {"job_id": "1", "generation": "2"} in [one["labels"] for series in exemplars for one in series["exemplars"]]
    assert found.value('muster_signals_total{kind="gpu-throttle",code="64"}') == 1
    assert found.ask('muster_node_health{node="n3",health="DEGRADED"}')
    assert 0 < found.value("muster_job_goodput_ratio") <= 1
    wait_until(lambda: found.ask("muster_goodput_ratio"), 90, "the goodput of all jobs is summed up")
    wait_until(lambda: found.ask("muster:nodes_out_of_service:ratio"), 60, "the rules are evaluated")
    each_expression_is_answered(found)


def each_expression_is_answered(found: Prometheus) -> None:
    """No expression is wrong, and those of which there must be data are not empty."""
    empty = []
    for text in expressions():
        answered = found.ask(text.replace("$job_id", "1").replace("$instance", ".*"))
        if not answered and not any(name in text for name in MAY_BE_EMPTY):
            empty.append(text)
    assert empty == []
    for text in alerts():
        found.ask(text)
    assert not found.ask('ALERTS{alertname="MusterCoordinatorDown"}')
