"""The README's picture and table of recoveries show what benchmarks/recovery.json holds. Nothing is drawn here."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _load(name: str) -> ModuleType:
    """A module of benchmarks/, which is no part of the distribution."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    return _load("recovery_figures")


@pytest.fixture(scope="module")
def measured(figures: ModuleType) -> Any:
    return json.loads(figures.FILE.read_text())


def _texts(picture: Path) -> Counter[str]:
    """Every text of the picture. A label of matplotlib's is text, whichever version has drawn it."""
    root = ElementTree.parse(picture).getroot()
    return Counter(text.strip() for node in root.iter() if (text := node.text) and text.strip())


def test_the_picture_shows_every_figure(figures: ModuleType, measured: Any) -> None:
    shown = _texts(figures.PICTURE)
    groups = figures.compared_bars(measured["results"])
    bars = [*figures.muster_bars(measured["results"]), *(bar for group in groups for bar in group)]
    wanted = Counter(bar.label for bar in bars)
    assert {label: shown[label] for label in wanted} == dict(wanted), "run: make figures"
    assert all(shown[words] for words in figures.FAULTS.values()), "run: make figures"


def test_the_picture_was_drawn_from_these_figures(figures: ModuleType, measured: Any) -> None:
    assert _texts(figures.PICTURE)[f"figures {figures.digest(measured)}"] == 1, "run: make figures"


def test_the_readme_holds_the_table_of_these_figures(figures: ModuleType, measured: Any) -> None:
    assert figures.BLOCK.findall(figures.README.read_text()) == [figures.table(measured)], "run: make figures"


def test_when_and_where_it_was_measured_is_told(measured: Any) -> None:
    assert measured["measured"] >= "2026-11-22"
    assert measured["runs"] >= 1
    assert measured["machine"]
    assert measured["source"]


def test_the_benchmark_writes_what_the_file_holds(figures: ModuleType, measured: Any) -> None:
    bench = _load("bench_recovery")
    assert bench.measured(measured["results"], measured["runs"]).keys() == measured.keys()
    assert [fault.name for fault in bench.FAULTS] == list(figures.FAULTS)
    steps = bench.Figures(total=[2.0, 1.0, 4.0], phases={p: [0.5] for p in bench.PHASES}, redone=[0, 2], step_s=[0.3])
    found = bench.summary({"xid": steps})
    assert found["xid"].keys() >= measured["results"]["xid"].keys()
    assert [bar.label for bar in figures.muster_bars(found)] == ["2.0 s"]


def test_what_did_not_recover_is_shown_as_such(figures: ModuleType) -> None:
    cells = {"node_crash": {"median_s": 1.0, "worst_s": 2.0, "steps_redone": 0}}
    peers = {"torchrun_tuned": {"node_crash": {"median_s": None}}}
    results = {**cells, "step_s": 0.1, "peers": peers}
    assert [bar.label for bar in figures.compared_bars(results)[0]] == ["1.0 s", "never"]
    assert figures.table({"runs": 3, "results": results}).splitlines()[-1] == (
        "| all processes of a node die | 1.0 s (2.0 s) | none | never |"
    )


def test_figures_without_peers_make_a_table_too(figures: ModuleType) -> None:
    results = {"xid": {"median_s": 1.0, "worst_s": 2.0, "steps_redone": 3}, "step_s": 0.1, "peers": {}}
    assert figures.compared_bars(results) == []
    assert figures.table({"runs": 3, "results": results}).splitlines()[-1] == (
        "| a GPU reports a fatal Xid | 1.0 s (2.0 s) | at most 3 |"
    )
