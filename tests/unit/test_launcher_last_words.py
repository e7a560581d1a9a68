"""The last words of a job that has failed, in `muster status` and `muster diagnose`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from muster.daemon.coordinator.services.views import gang_view
from muster.daemon.host import rank_log_files
from muster.fabric.sources.nesting import fabric_of_leaves
from muster.launcher.diagnosis.diagnosis import Network, diagnose
from muster.launcher.diagnosis.screen import lines
from muster.launcher.output.job_screen import one_screen
from muster.launcher.output.last_words import MOST_CHARS, MOST_LINES, first_to_fail, last_words, lines_of
from muster.launcher.output.screen import Screen
from muster.launcher.output.tables import gang_details
from muster.simulator.scenario import Scenario
from muster.v1.api_pb2 import GangView
from muster.v1.diagnosis_pb2 import JobMeasurements

REASON = "3 consecutive generations ended without progress; last: rank 1 on n7 exited with 1: ValueError: rank 9 on n1"


def failed(folder: Path, reason: str = REASON) -> GangView:
    return GangView(run_dir=str(folder), gang_id="g1", generation=3, final=True, phase="FAILED", reason=reason)


def write_log(folder: Path, text: str, rank: int = 1) -> None:
    written = rank_log_files.open_log(str(folder), "g1", 3, rank)
    os.write(written, text.encode())
    os.close(written)


@pytest.mark.parametrize("exit_code", [1, -11])
def test_the_reason_of_the_core_names_the_rank_that_failed_first(exit_code: int) -> None:
    world = Scenario(2, 0, max_failures=1)
    world.run_until(lambda: world.is_running(1))
    world.kill_rank(world.gang.roster.seats[1].node, exit_code)
    world.run_until(lambda: world.gang.final)
    view = gang_view(world.core.state, world.core.observed, world.gang, world.now)
    assert first_to_fail(view) == 1
    assert view.generation == 1


@pytest.mark.parametrize(
    "view",
    [
        GangView(final=False, phase="RUNNING", reason=REASON),
        GangView(final=True, phase="CANCELLED", reason=REASON),
        GangView(final=True, phase="FAILED", reason="n1 is lost"),
    ],
    ids=["it goes on", "a user has ended it", "a node has ended it"],
)
async def test_only_a_job_that_a_rank_has_ended_has_last_words(view: GangView) -> None:
    assert await last_words(view) == []


async def test_they_are_the_last_lines_of_that_rank(tmp_path: Path) -> None:
    write_log(tmp_path, 'step 1\nTraceback (most recent call last):\n\n  File "t.py", line 1\nValueError: no\n')
    write_log(tmp_path, "another rank\n", rank=9)
    found = await last_words(failed(tmp_path))
    assert found == ["step 1", "Traceback (most recent call last):", '  File "t.py", line 1', "ValueError: no"]


async def test_a_log_that_is_not_there_has_no_words(tmp_path: Path) -> None:
    assert await last_words(failed(tmp_path)) == []
    (tmp_path / "logs/g1/g3").mkdir(parents=True)
    (tmp_path / "logs/g1/g3/rank1.log").symlink_to("/etc/passwd")
    assert await last_words(failed(tmp_path)) == []


def test_they_are_few_short_and_plain() -> None:
    found = lines_of("".join(f"line {at}\x1b]0;title\x07\n" for at in range(100)) + "x" * 10_000 + "\n\n")
    assert len(found) == MOST_LINES
    assert found[0] == f"line {101 - MOST_LINES}\\x1b]0;title\\x07"
    assert len(found[-1]) == MOST_CHARS + len("...")
    assert lines_of("  0%|  |\r 50%|# |\r100%|##|\n\tdone\r\n") == ["100%|##|", "    done"]


@pytest.mark.parametrize("width", [80, None])
def test_status_and_diagnose_show_them_below_the_reason(tmp_path: Path, width: int | None) -> None:
    view, screen = failed(tmp_path), Screen(width)
    nothing = diagnose(JobMeasurements(gang=view), None, Network(fabric_of_leaves({"n1": ""}), "", False), None, [])
    nothing.last_words.append("ValueError: no")
    for shown in (
        list(one_screen(view, screen, 1.0, ["ValueError: no"])),
        list(gang_details(view, screen, ["ValueError: no"])),
        list(lines(nothing, screen)),
    ):
        (line,) = [line for line in shown if line.startswith("last words")]
        assert line.endswith("ValueError: no")
