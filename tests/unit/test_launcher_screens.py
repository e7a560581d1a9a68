"""What holds for every screen of every command, on terminals of 80, 132 and 200 columns and in a pipe.

A dozen of them are compared with golden files. MUSTER_GOLDEN=write writes them again; read the diff.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import re
from datetime import UTC, timedelta, timezone
from pathlib import Path

import pytest
from tests.unit.screens import EXITED, LOST, NOW, SCREENS, UNCORRECTABLE, events, gang, jobs, roll_call

from muster.launcher.command import print_note
from muster.launcher.main import COMMANDS, main, parser
from muster.launcher.output import job_lines
from muster.launcher.output.job_list import Selection, gang_list
from muster.launcher.output.node_tables import node_lines
from muster.launcher.output.screen import Screen, open_screen, time_with_zone
from muster.launcher.output.table import table
from muster.launcher.output.tables import gang_details
from muster.v1.api_pb2 import GangView, GoodputView, NodeView, RecoveryView

GOLDEN = Path(__file__).parent / "golden" / "screens"
WIDTHS = (80, 132, 200)
PIPE = Screen(zone=UTC)
OF_TERMINALS = "(UTC) time why see node the reason above excluded generation what it waits for"
"""Words that a terminal shows in place of a zone, a heading or a reason that stands on the screen already."""
KEPT = (
    *(("status-12", width) for width in (80, 132, None)),
    *(("status-job-2", width) for width in (80, 200, None)),
    ("status-job-ended", 80),
    ("status-job-measured", None),
    ("status-screen-2", 80),
    ("status-screen-512", 80),
    ("status-screen-512", 132),
    ("status-screen-ended", 80),
    ("status-screen-queued", 80),
    ("nodes-verbose", 80),
    ("nodes-verbose", 200),
    ("events-1", 80),
    ("topo-verbose", 80),
    ("check", 132),
    ("diagnose", 80),
    ("policy-explain", 80),
)


class Terminal(io.StringIO):
    """Output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(name: str, width: int | None) -> list[str]:
    return list(SCREENS[name](Screen(width, zone=UTC)))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SCREENS)
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    """A word that no line has room for stays whole, so that a path can be copied."""
    wide = [line for line in shown(name, width) if len(line) > width]
    assert [line for line in wide if max(map(len, line.split())) < width / 2] == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SCREENS)
def test_no_word_is_split(name: str, width: int) -> None:
    whole = {_bare(word) for word in " ".join(shown(name, None)).split()} | set(OF_TERMINALS.split())
    assert [word for line in shown(name, width) for word in line.split() if _bare(word) not in whole] == []


def _bare(word: str) -> str:
    return word.strip(",:;").removesuffix("+00:00")


@pytest.mark.parametrize("name", SCREENS)
def test_a_pipe_gets_no_padding(name: str) -> None:
    lines = shown(name, None)
    cells = [cell for line in lines if not re.match("[│├└ ]", line) for cell in line.split("\t")]
    assert [cell for cell in cells if cell != cell.strip()] == []


@pytest.mark.parametrize(
    ("name", "lines", "reason", "count"),
    [
        ("status-200", 201, EXITED, 50),  # the heading is a line
        ("nodes-200", 201, UNCORRECTABLE, 40),
        ("nodes-verbose", 8, UNCORRECTABLE, 2),
        ("events-200", 200, LOST, 100),
    ],
)
def test_a_record_is_one_line_of_a_pipe_and_ends_with_the_whole_reason(
    name: str, lines: int, reason: str, count: int
) -> None:
    found = shown(name, None)
    assert len(found) == lines
    assert sum(line.endswith(reason) for line in found) == count
    assert len({line.count("\t") for line in found}) == 1


def test_each_time_in_a_pipe_has_its_date_and_zone() -> None:
    cells = [
        cell for name in SCREENS for line in shown(name, None) for cell in re.findall(r"\S*\d\d:\d\d:\d\d\S*", line)
    ]
    assert len(cells) > 200
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d(\.\d{3})?\+00:00", cell) for cell in cells)


def test_a_terminal_names_the_zone_once_for_each_table() -> None:
    east = Screen(200, zone=timezone(timedelta(hours=5, minutes=30)))
    lines = list(gang_details(gang(2), east))
    assert sum(line.count("(UTC+05:30)") for line in lines) == 2
    assert [line for line in lines if "2027-01-15 13:30:00  its repair" in line]
    assert sum(line.count("+05:30") for line in lines) == 2
    assert events(1, east)[0] == "time (UTC+05:30)"
    assert time_with_zone(NOW, east.zone) == "2027-01-15 13:30 UTC+05:30"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", [entry.name for entry in COMMANDS])
def test_the_help_of_each_command_fits(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3
    assert [line for line in lines if len(line) > width] == []


@pytest.mark.parametrize("command", [entry.name for entry in COMMANDS])
def test_each_argument_of_a_command_has_a_help(command: str) -> None:
    """For a command with actions, those of each action."""
    silent, parsers = [], [parser([command])]
    for one in parsers:
        for action in one._actions:
            choices = action.choices if isinstance(action, argparse._SubParsersAction) else {}
            parsers += [below for name, below in choices.items() if one is not parsers[0] or name == command]
            silent += [action.dest] if not action.help and not choices else []
    assert silent == []
    assert len(parsers) >= 2


def test_no_word_of_a_help_is_broken_at_a_hyphen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if re.search(r"\w-$", line)] == []


def test_a_note_on_a_terminal_is_broken_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_note("muster: a note of several words\n  with a hint that is as long")
    assert capsys.readouterr().err == "muster: a note of several words\n  with a hint that is as long\n"
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "24")
    with contextlib.redirect_stderr(terminal):
        print_note("muster: a note of several words\n  with a hint that is as long")
    assert terminal.getvalue().splitlines() == [
        "muster: a note of",
        "  several words",
        "  with a hint that is as",
        "    long",
    ]


@pytest.mark.parametrize("command", ["status", "events", "nodes", "diagnose"])
def test_times_are_shown_in_utc_on_request(command: str) -> None:
    job = ["42"] if command == "diagnose" else []
    options = parser([command]).parse_args([command, "--utc", *job])
    assert open_screen(io.StringIO(), utc=options.utc).zone is UTC


def test_the_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "132")
    assert open_screen(Terminal()).width == 132
    assert open_screen(io.StringIO()).width is None


def test_records_keep_their_order() -> None:
    shuffled = jobs(200)
    random.Random(7).shuffle(shuffled)
    assert list(gang_list(shuffled, PIPE)) == list(gang_list(jobs(200), PIPE))
    assert list(gang_list(jobs(200), PIPE))[1].startswith("40000 50000\t")


def test_one_reason_is_shown_once_on_a_terminal() -> None:
    for width in WIDTHS:
        text = " ".join(" ".join(gang_details(gang(2, final=True), Screen(width, zone=UTC))).split())
        assert (text.count(LOST), text.count(EXITED)) == (1, 1)
        assert "see node n1" in text
        assert "see the reason above" in text


def test_jobs_that_ended_more_than_a_day_ago_are_listed_on_request_only() -> None:
    views = [
        GangView(gang_id="runs"),
        GangView(gang_id="ended today", final=True, ended_s=NOW - 3600),
        GangView(gang_id="ended before", final=True, ended_s=NOW - 90_000),
        GangView(gang_id="of an older coordinator", final=True),
    ]
    kept = [view.gang_id for view in views if Selection().includes(view, NOW)]
    assert kept == ["runs", "ended today", "of an older coordinator"]
    assert all(Selection(within_s=None).includes(view, NOW) for view in views)


def test_a_recovery_says_where_training_goes_on_and_what_is_repeated() -> None:
    view = gang(0)
    view.recoveries.extend(
        RecoveryView(generation=2, started_s=NOW, step_before=298, step_restored=step) for step in (298, 297)
    )
    text = "\n".join(gang_details(view, PIPE))
    assert "\tstep 298\t" in text
    assert "\tstep 297, 1 repeated\t" in text


def test_a_node_that_the_job_does_not_take_back_says_why() -> None:
    text = "\n".join(gang_details(gang(2), PIPE))
    assert "the job does not ask for it back: a lemon: 4 failures within 30 days; Xid 95" in text


def test_the_roll_call_of_a_large_site_names_no_column_without_a_value() -> None:
    heading, *_ = node_lines([NodeView(node="n1", verdict="FIT", heard_s_ago=1.0)], Screen(80))
    assert heading == "node  verdict  musterd  heard"
    assert len(list(node_lines(roll_call(2000), PIPE))) == 2001


def test_prose_stands_beside_the_other_columns_where_half_a_terminal_is_left() -> None:
    rows = [("n1", "UNFIT", "a reason of many words that does not fit beside the others")]
    assert list(table(Screen(60), ("node", "verdict", "why"), rows)) == [
        "node  verdict  why",
        "n1    UNFIT    a reason of many words that does not fit",
        "               beside the others",
    ]
    assert list(table(Screen(50), ("node", "verdict", "why"), rows)) == [
        "node  verdict",
        "n1    UNFIT",
        "    why: a reason of many words that does not fit",
        "    beside the others",
    ]
    assert list(table(Screen(24), ("jobs", "phase", "why"), [("40001 40002 40003 40004 40005", "RUNNING", "")])) == [
        "jobs",
        "40001 40002 40003 40004",
        "    40005",
        "    phase: RUNNING",
    ]


@pytest.mark.parametrize(("name", "width"), KEPT)
def test_golden(name: str, width: int | None) -> None:
    file = GOLDEN / f"{name}.{width or 'pipe'}.txt"
    text = "".join(f"{line}\n" for line in shown(name, width))
    if os.environ.get("MUSTER_GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def test_before_the_first_generation_no_node_is_a_spare() -> None:
    nodes = [NodeView(node="n1", verdict="FIT", role="spare"), NodeView(node="n2", verdict="FIT", role="absent")]
    lines = list(gang_details(GangView(slurm_job_ids=[1], phase="GATHERING", nodes=nodes), PIPE))
    assert "nodes\t1 attached, none had ranks so far" in lines
    assert [line.split("\t")[:3] for line in lines[-2:]] == [["n1", "FIT", ""], ["n2", "FIT", "absent"]]


def test_a_job_of_which_no_step_is_known_is_not_said_to_stand_at_step_0() -> None:
    """What it has trained, its script alone knows. For how long its ranks ran is known."""
    spent = GoodputView(allocated_node_s=1000.0, since_s=NOW - 500, until_s=NOW)
    spent.useful_node_s = spent.steps_unknown_node_s = 940.0
    spent.lost.add(category="fence", node_s=60.0)
    recovery = RecoveryView(generation=2, action="restart in place", suspected_s=NOW - 60, running_s=NOW - 58)
    view = GangView(phase="RUNNING", generation=2, goodput=spent, recoveries=[recovery])
    moment = job_lines.Moment(NOW, Screen())
    assert dict(job_lines.pace_lines(view, moment)) == {"progress": "no step is known: its script says none"}
    words = "not known without steps; its ranks ran for 94.0% of 8.33 min; lost: fence 6.0%"
    assert job_lines.goodput_words(view) == words
    assert job_lines.goodput_share(view) == ""
    assert "ranks ran again after 2 s" in job_lines.recovery_words(view, moment)
    older = GangView(phase="RUNNING", generation=2, goodput=spent)
    older.goodput.useful_node_s = older.goodput.steps_unknown_node_s = 0.0
    older.goodput.lost.add(category="first_step", node_s=940.0)
    assert job_lines.goodput_words(older) == words
    view.step = 3
    assert job_lines.goodput_words(view).startswith("94.0% of ")
    assert dict(job_lines.pace_lines(view, moment)) == {"progress": "step 3"}
