"""The first change that CONTRIBUTING.md works out does what it says: its sensor with its table of the policy."""

from __future__ import annotations

import re
import tomllib
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

from muster.daemon.coordinator.policy import policy
from muster.daemon.node.sensors.sensor import SensorPaths
from muster.daemon.node.signal_windows import SignalRule
from muster.daemon.testing import watched_sensor
from muster.daemon.testing.watched_sensor import WatchedSensor

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
SECTION = PAGE.read_text().partition("## A first change")[2].partition("\n## ")[0]


def _shown(begin: str) -> str:
    """The block of code whose text begins so."""
    return next(block for block in re.findall(r"```\w*\n(.*?)```", SECTION, re.DOTALL) if block.startswith(begin))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    folder = tmp_path / "proc/sys/net/netfilter"
    folder.mkdir(parents=True)
    (folder / "nf_conntrack_max").write_text("1000\n")
    (folder / "nf_conntrack_count").write_text("10\n")
    return folder


@pytest.fixture
async def watched(tmp_path: Path, table: Path) -> AsyncIterator[WatchedSensor]:
    kind = policy._SignalKind.model_validate(tomllib.loads(_shown("[conntrack]"))["conntrack"])
    rules = [SignalRule(**asdict(row.when.rule("conntrack", code))) for code, row in kind.codes.items() if row.when]
    module = ModuleType("conntrack")
    exec(compile(_shown('"""Sensor'), PAGE, "exec"), module.__dict__)
    paths = SensorPaths(host_root=tmp_path)
    async with watched_sensor.watching(rules, lambda it: module.ConntrackSensor(paths, it.now, it.pause)) as watched:
        yield watched


async def test_the_sensor_that_is_shown_reports_what_is_said(watched: WatchedSensor, table: Path) -> None:
    assert await watched.seconds(60) == []
    (table / "nf_conntrack_count").write_text("960\n")
    assert await watched.seconds(120) == ["conntrack 1"]


def test_no_cell_of_the_guide_is_a_page() -> None:
    cells = [cell for row in re.findall(r"^\|.*$", PAGE.read_text(), re.MULTILINE) for cell in row.split("|")]
    assert max(map(len, cells)) < 400
