"""monitoring/: rules, their tests and dashboards are what metrics, promtool and Grafana's documented model allow."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from muster.daemon.coordinator.metrics.families import GAUGES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "monitoring"
RULES = [rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((FOLDER / "dashboards").glob("*.json"))}
PAGE = (ROOT / "docs/operations/metrics.md").read_text()


def expressions() -> list[str]:
    panels = [target["expr"] for one in DASHBOARDS.values() for panel in one["panels"] for target in panel["targets"]]
    return [*panels, *(rule["expr"] for rule in RULES)]


def test_each_alert_says_what_it_is_and_leads_to_what_to_do() -> None:
    for rule in ALERTS:
        notes = rule["annotations"]
        assert notes.keys() == {"summary", "description", "runbook_url"}, rule["alert"]
        path, _, heading = notes["runbook_url"].partition("#")
        headings = re.findall(r"^## (\w+)$", (ROOT / path).read_text(), re.MULTILINE)
        assert heading == rule["alert"].lower()
        assert rule["alert"] in headings
        assert rule["labels"]["severity"] in ("info", "warning", "critical")


def test_each_expression_names_metrics_that_there_are() -> None:
    known = {*GAUGES, *re.findall(r"`(muster_\w+)`", PAGE)}
    known |= {f"{name}_{part}" for name in ("muster_recovery_seconds",) for part in ("sum", "count", "bucket")}
    for text in expressions():
        assert set(re.findall(r"\bmuster_\w+", text)) <= known, text


def test_the_dashboards_are_those_of_the_program() -> None:
    made = runpy.run_path(str(FOLDER / "make_dashboards.py"))
    assert {name: made["text_of"](name) for name in made["DASHBOARDS"]} == {
        path.stem: path.read_text() for path in (FOLDER / "dashboards").glob("*.json")
    }


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_what_grafanas_json_model_asks(name: str) -> None:
    one: dict[str, Any] = DASHBOARDS[name]
    assert one["uid"] == f"muster-{name}"
    assert len(one["uid"]) <= 40
    variables = {variable["name"] for variable in one["templating"]["list"]}
    panels = one["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["type"] in {"timeseries", "stat", "bargauge", "state-timeline"}
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert set(re.findall(r"\$(\w+)", " ".join(target["expr"] for target in panel["targets"]))) <= variables
        place = panel["gridPos"]
        assert 0 < place["w"] <= 24 - place["x"]
    for first, second in combinations([panel["gridPos"] for panel in panels], 2):
        beside = first["x"] + first["w"] <= second["x"] or second["x"] + second["w"] <= first["x"]
        assert beside or first["y"] + first["h"] <= second["y"] or second["y"] + second["h"] <= first["y"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool comes with Debian's prometheus")
@pytest.mark.parametrize("arguments", [("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")])
def test_promtool_finds_no_fault(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
