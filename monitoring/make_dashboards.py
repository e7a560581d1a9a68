"""Writes the dashboards of Grafana, one JSON file each: python monitoring/make_dashboards.py

A panel is a title, a kind, a unit and its queries. All panels of a row have the same width.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "dashboards"
_WIDTH, _HEIGHT = 24, 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """One picture. `queries`: the expression, and what a series is called. `kind`: Grafana's name of the panel."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    about: str = ""


_JOB = 'job_id="$job_id"'
_LOST = "The parts add up to the allocated time that trained nothing new."

FLEET = (
    (
        Panel("Nodes by health", (("sum by (health) (muster_nodes)", "{{health}}"),), kind="bargauge"),
        Panel("Nodes out of service", (("muster:nodes_out_of_service:ratio", "share"),), "percentunit", "stat"),
        Panel("Jobs by phase", (("count by (phase) (muster_job_phase)", "{{phase}}"),), kind="bargauge"),
        Panel("Goodput", (("muster_goodput_ratio", "{{window}}"),), "percentunit", "stat"),
    ),
    (
        Panel("Recoveries by cause", (("sum by (cause) (increase(muster_recoveries_total[1h]))", "{{cause}}"),)),
        Panel("Recoveries by action", (("sum by (action) (increase(muster_recoveries_total[1h]))", "{{action}}"),)),
    ),
    (
        Panel(
            "Mean time of each phase of a recovery",
            (
                (
                    "sum by (phase) (rate(muster_recovery_seconds_sum[1h]))"
                    " / sum by (phase) (rate(muster_recovery_seconds_count[1h]))",
                    "{{phase}}",
                ),
            ),
            "s",
            about="The phases add up to the time from the first sign of a fault to the first step after it.",
        ),
        Panel("Steps done again", (("sum(increase(muster_steps_repeated_total[1h]))", "steps"),)),
        Panel("Jobs that ended", (("sum by (phase) (increase(muster_jobs_ended_total[1h]))", "{{phase}}"),)),
    ),
    (
        Panel("Age of heartbeats", (("muster_heartbeat_age_seconds", "{{source}} {{quantile}}"),), "s"),
        Panel("Calls that Slurm is owed", (("muster_slurm_calls_owed", "calls"),)),
        Panel("Time in the journal", (("rate(muster_journal_write_seconds_total[5m])", "share"),), "percentunit"),
        Panel("Time of a scrape", (("muster_scrape_duration_seconds", "seconds"),), "s"),
    ),
)
JOB = (
    (
        Panel("Job", ((f"muster_job_info{{{_JOB}}}", "{{job_name}} of {{user}}"),), kind="stat"),
        Panel("Phase", ((f"muster_job_phase{{{_JOB}}}", "{{phase}}"),), kind="state-timeline"),
        Panel("Generation", ((f"muster_generation{{{_JOB}}}", "generation"),), kind="stat"),
        Panel("Goodput", ((f"muster_job_goodput_ratio{{{_JOB}}}", "goodput"),), "percentunit", "stat"),
    ),
    (
        Panel("Step", ((f"muster_step{{{_JOB}}}", "step"),)),
        Panel(
            "Time of a step",
            (
                (f"muster_step_seconds{{{_JOB}}}", "whole"),
                (f"muster_step_compute_seconds{{{_JOB}}}", "compute"),
                (f"muster_step_wait_seconds{{{_JOB}}}", "wait for ranks"),
                (f"muster_step_fetch_seconds{{{_JOB}}}", "wait for data"),
            ),
            "s",
        ),
    ),
    (
        Panel("Loss", ((f"muster_loss{{{_JOB}}}", "loss"),)),
        Panel("Gradient norm", ((f"muster_gradient_norm{{{_JOB}}}", "gradient norm"),)),
        Panel("MFU", ((f"muster_mfu_ratio{{{_JOB}}}", "MFU"),), "percentunit"),
        Panel("Tokens of one GPU in a second", ((f"muster_tokens_per_gpu_per_second{{{_JOB}}}", "tokens"),)),
    ),
    (
        Panel("Training time that a fault loses", ((f"muster_checkpoint_age_seconds{{{_JOB}}}", "{{tier}}"),), "s"),
        Panel("Time of a checkpoint", ((f"muster_checkpoint_seconds{{{_JOB}}}", "{{tier}}"),), "s"),
        Panel("Size of checkpoints", ((f"muster_checkpoint_bytes{{{_JOB}}}", "{{tier}}"),), "bytes"),
        Panel("Nodes and spares", (
            (f"muster_job_nodes{{{_JOB}}}", "with ranks"), (f"muster_spares{{{_JOB}}}", "spares {{state}}"),
        )),
    ),
)  # fmt: skip
NODE = (
    (
        Panel("Health", (("muster_node_health", "{{node}} {{health}}"),), kind="state-timeline",
              about="Nodes that are not in full health."),
        Panel("Signals", (("sum by (kind, code, action) (increase(muster_signals_total[1h])) > 0",
                           "{{kind}} {{code}}: {{action}}"),)),
    ),
    (
        Panel("Signals of the node", (('muster_node_signals_total{instance=~"$instance"}', "{{kind}} {{code}}"),)),
        Panel("Signals not confirmed", (('muster_signals_waiting{instance=~"$instance"}', "{{instance}}"),)),
        Panel("Kernel messages that could not be read",
              (('muster_kernel_lines_unparsed_total{instance=~"$instance"}', "{{instance}}: errors of GPUs"),
               ('muster_kernel_driver_lines_total{instance=~"$instance"}', "{{instance}}: trouble of {{driver}}"))),
        Panel("Since the coordinator answered",
              (('muster_coordinator_answer_age_seconds{instance=~"$instance"}', "{{instance}}"),), "s"),
    ),
    (
        Panel("Conditions that last", (('muster_node_conditions{instance=~"$instance"}',
                                        "{{instance}} {{kind}} {{code}} GPU {{gpu}}"),)),
        Panel("Step of each rank", (('muster_rank_step{instance=~"$instance"}', "job {{job_id}} rank {{rank}}"),)),
        Panel("Work of each rank in a step", (('muster_rank_compute_seconds{instance=~"$instance"}',
                                               "job {{job_id}} rank {{rank}} GPU {{gpu}}"),), "s"),
    ),
    (
        Panel("Checkpoints in memory",
              (('muster_node_checkpoint_bytes{instance=~"$instance"}', "job {{job_id}} {{kind}}"),), "bytes"),
        Panel("Memory of requeued jobs", (('muster_kept_memory_bytes{instance=~"$instance"}', "{{instance}}"),),
              "bytes"),
    ),
)  # fmt: skip
GOODPUT = (
    (
        Panel("Goodput", (("muster_goodput_ratio", "{{window}}"),), "percentunit", "stat"),
        Panel("Goodput over time", (("muster_goodput_ratio", "{{window}}"),), "percentunit"),
    ),
    (
        Panel("Where the last week went",
              (('sum by (category) (muster_lost_node_seconds{window="7d"})', "{{category}}"),), "s", "bargauge", _LOST),
        Panel("Where the last day went",
              (('sum by (category) (muster_lost_node_seconds{window="1d"})', "{{category}}"),), "s", "bargauge", _LOST),
    ),
    (
        Panel("Jobs with the least goodput", (("bottomk(10, muster_job_goodput_ratio)", "{{job_id}}"),),
              "percentunit", "bargauge"),
        Panel("Recoveries in a week", (("sum by (cause) (increase(muster_recoveries_total[7d]))", "{{cause}}"),),
              kind="bargauge"),
    ),
)  # fmt: skip


def _panel(number: int, one: Panel, x: int, y: int, width: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + place), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
        for place, (query, legend) in enumerate(one.queries)
    ]
    return {
        "id": number, "type": one.kind, "title": one.title, "description": one.about, "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": width, "h": _HEIGHT}, "targets": targets, "options": {},
        "fieldConfig": {"defaults": {"unit": one.unit, "min": 0}, "overrides": []},
    }  # fmt: skip


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name, "label": label, "type": "query", "datasource": _SOURCE, "query": query, "definition": query,
        "refresh": 2, "sort": 3, "includeAll": name == "instance", "multi": name == "instance",
    }  # fmt: skip


def dashboard(name: str, rows: tuple[tuple[Panel, ...], ...], *variables: dict[str, Any]) -> dict[str, Any]:
    """The JSON model of one dashboard."""
    panels = []
    for y, row in enumerate(rows):
        width = _WIDTH // len(row)
        panels += [
            _panel(len(panels) + place + 1, one, place * width, y * _HEIGHT, width) for place, one in enumerate(row)
        ]
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "uid": f"muster-{name}", "title": f"Muster: {name}", "tags": ["muster"], "schemaVersion": 38, "version": 1,
        "editable": False, "time": {"from": "now-6h", "to": "now"}, "refresh": "30s", "timezone": "browser",
        "templating": {"list": [source, *variables]}, "annotations": {"list": []}, "panels": panels,
    }  # fmt: skip


DASHBOARDS = {
    "fleet": dashboard("fleet", FLEET),
    "job": dashboard("job", JOB, _variable("job_id", "Job", "label_values(muster_job_info, job_id)")),
    "node": dashboard("node", NODE, _variable("instance", "Node", "label_values(muster_signals_waiting, instance)")),
    "goodput": dashboard("goodput", GOODPUT),
}


def text_of(name: str) -> str:
    """The file of one dashboard."""
    return json.dumps(DASHBOARDS[name], indent=1) + "\n"


if __name__ == "__main__":
    for one in DASHBOARDS:
        (FOLDER / f"{one}.json").write_text(text_of(one))
