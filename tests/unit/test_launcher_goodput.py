"""`muster goodput`: the table, CSV and JSON of the account over all jobs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator
from datetime import UTC
from pathlib import Path

import pytest
import pytest_asyncio

from muster.daemon.coordinator.core.state import facts
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld
from muster.launcher.main import parser
from muster.launcher.output import goodput_table
from muster.launcher.output.screen import Screen
from muster.v1.goodput_pb2 import GoodputPart, GoodputRow

H = 3600.0
ROWS = [
    GoodputRow(
        key="n7",
        parts=[GoodputPart(category="steps_again", gpu_s=30 * H), GoodputPart(category="fence", gpu_s=10 * H)],
        faults=3,
    ),
    GoodputRow(
        parts=[
            GoodputPart(category="useful", gpu_s=900 * H),
            GoodputPart(category="spare", gpu_s=60 * H),
            GoodputPart(category="queue", gpu_s=500 * H),
        ],
        saved_gpu_s=75 * H,
    ),
]


def lines(width: int | None = 100, price: float = 0.0) -> list[str]:
    screen = Screen(width, zone=UTC)
    return [*goodput_table.goodput_lines(goodput_table.groups(ROWS, price), "node", price, screen)]


def test_the_node_that_has_cost_most_stands_first_and_the_total_last() -> None:
    rows = [line.split("\t") for line in lines(None)]
    assert rows[0] == ["node", "lost h", "useful h", "goodput", "faults", "where it went"]
    assert rows[1] == ["n7", "40.0", "", "", "3", "steps again 30.0, fence 10.0"]
    assert rows[2] == ["(no node)", "60.0", "900.0", "93.8%", "", "spare 60.0"]
    assert rows[3][:4] == ["total", "100.0", "900.0", "90.0%"]
    assert rows[4] == [
        "90.0% of 1,000.0 GPU hours trained; 100.0 were lost, to 3 faults and to what every job needs. Spares idled "
        "for 60.0 and have saved 75.0, beside a requeue for each fault. Jobs waited in the queue for 500.0"
    ]


def test_a_price_shows_what_was_lost_in_money() -> None:
    assert "100 at 2 an hour" not in " ".join(lines())
    text = " ".join(lines(price=2.0))
    assert "(200 at 2 an hour)" in text
    assert "money" in text


def test_eighty_columns_are_enough() -> None:
    assert all(len(line) <= 80 for line in lines(80, price=2.0))


def test_csv_has_a_line_for_each_category() -> None:
    found = goodput_table.groups(ROWS, 0.0)
    rows = [*csv.DictReader(io.StringIO(goodput_table.as_csv(found, "node")))]
    assert {"node": "n7", "category": "fence", "gpu_hours": "10.000000"} in rows
    assert sum(float(row["gpu_hours"]) for row in rows) == pytest.approx(1500)


def test_json_has_the_total() -> None:
    found = json.loads(goodput_table.as_json(goodput_table.groups(ROWS, 2.0), "node", 1.0, 2.0))
    assert found["total"]["goodput"] == 0.9
    assert found["total"]["lost_money"] == 200
    assert [one["key"] for one in found["groups"]] == ["n7", ""]


def test_nothing_allocated_is_said() -> None:
    assert [*goodput_table.goodput_lines([], "job", 0.0, Screen(80))][-1] == "no GPU was allocated in this time"


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ScriptedWorld]:
    """A job trains on two nodes."""
    made = ScriptedWorld.create(tmp_path)
    await made.start_coordinator()
    await made.start_agents(NODES)
    await made.wait_for_duty("RUN 1", ["n1", "n2"])
    for node in ("n1", "n2"):
        await made.agents[node].step(40)
    await made.wait_for_facts(facts.FirstStep)
    yield made
    await made.close()


@pytest.mark.parametrize("by", ["account", "cause", "node", "leaf", "job"])
async def test_the_command_asks_the_coordinator(
    world: ScriptedWorld, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    command = ["goodput", "--coordinator", world.address, "--auth", f"secret:{world.folder.parent}/secret"]
    options = parser().parse_args([*command, "--by", by, "--json", "--since", "12h"])
    assert await options.row.run(options) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total"]["allocated_gpu_hours"] > 0
    assert found["until_s"] - found["since_s"] == pytest.approx(12 * H, abs=600)
    keys = [one["key"] for one in found["groups"]]
    assert keys == ([f"1 {world.gang.account.name}"] if by == "job" else [""])


def test_the_hours_of_a_short_test_are_not_all_zero() -> None:
    parts = [GoodputPart(category="useful", gpu_s=90), GoodputPart(category="load", gpu_s=0.1)]
    row = GoodputRow(key="7 test", parts=parts)
    found = goodput_table.groups([row], 0.0)
    (cells, *_) = [line.split("\t") for line in goodput_table.goodput_lines(found, "job", 0.0, Screen(None))][1:]
    assert cells[1:4] == ["<0.0001", "0.025", "99.9%"]


def test_where_no_step_is_known_no_share_is_said() -> None:
    """Ranks of a script without the library ran: whether that was useful, it alone knows."""
    parts = [GoodputPart(category="steps_unknown", gpu_s=90 * H), GoodputPart(category="fence", gpu_s=10 * H)]
    found = goodput_table.groups([GoodputRow(key="42", parts=parts)], 0.0)
    rows = [*goodput_table.goodput_lines(found, "job", 0.0, Screen(None, zone=UTC))]
    assert rows[1].split("\t")[3] == "no steps"
    assert rows[-1].startswith("no step is known of 100.0 GPU hours; ranks ran for 90.0 of them.")


def test_what_is_not_known_of_steps_is_a_sentence_of_its_own() -> None:
    parts = [GoodputPart(category="useful", gpu_s=5 * H), GoodputPart(category="steps_unknown", gpu_s=3 * H)]
    row = GoodputRow(key="42", parts=[*parts, GoodputPart(category="fence", gpu_s=2 * H)], faults=2)
    *_, summary = goodput_table.goodput_lines(goodput_table.groups([row], 0.0), "job", 0.0, Screen(None, zone=UTC))
    assert summary == (
        "80.0% of 10.0 GPU hours trained; 2.0 were lost, to 2 faults and to what every job needs. "
        "No step is known of 3.0 that count as trained. Jobs waited in the queue for 0.0"
    )
