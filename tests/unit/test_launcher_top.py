"""What `muster top` draws of what it knows, and where its keys lead: without a terminal and without a clock."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC
from pathlib import Path

import pytest
from tests.unit.screens import LOST, NOW, gang, jobs, measured

from muster.launcher.errors import WrongInput
from muster.launcher.output import svg
from muster.launcher.output.job_lines import Moment
from muster.launcher.output.screen import Screen
from muster.launcher.top import pages
from muster.launcher.top.cells import text_of
from muster.launcher.top.known import EVENTS_KEPT, Known
from muster.launcher.top.messages import Message, read_recording, to_line
from muster.launcher.top.node_map import letter
from muster.launcher.top.place import (
    EVENTS,
    FILTER_CHARS,
    JOBS,
    KEYS,
    MAP,
    NODES,
    OVERVIEW,
    RANKS,
    RECOVERIES,
    Place,
    press,
)
from muster.node_health import NodeHealth
from muster.v1.api_pb2 import EventRecord, GangView, ListReply, NodesReply, NodeView

SIZES = ((80, 24), (120, 40), (40, 12))
ROOT = Path(__file__).resolve().parents[2]


def training() -> GangView:
    """A job with all that can be known of one, a rank that has exited and a slow one."""
    view = measured(4)
    view.ranks[9].slower_by = 0.3
    view.ranks[3].state, view.ranks[3].exit_code = "exited", 1
    return view


def site(count: int, leaf: int) -> list[NodeView]:
    """So many nodes with `leaf` of them at each leaf switch, and eight leaves in a pod."""
    return [
        NodeView(node=f"n{at}", verdict="FIT", leaf=f"leaf{at // leaf}", pod=f"pod{at // leaf // 8}", heard_s_ago=1.0)
        for at in range(count)
    ]


def known_of(*contents: GangView | EventRecord | ListReply | NodesReply | str) -> Known:
    known = Known()
    for content in contents:
        known.receive(Message(NOW, content))
    return known


def shown(known: Known, where: Place, now: float = NOW, width: int = 80, height: int = 24) -> list[str]:
    """The lines of the screen as text."""
    moment = Moment(now, Screen(width, zone=UTC))
    body = pages.body_of(known, where, moment, width)
    return [text_of(line) for line in pages.picture(known, where, body, moment, width, height)]


def pressed(known: Known, where: Place, *keys: str) -> Place:
    """The place after these keys; a key of one letter is a character."""
    for key in keys:
        body = pages.body_of(known, where, Moment(NOW, Screen(80, zone=UTC)), 80)
        found = press(where, key, key if len(key) == 1 else "", body)
        assert found is not None
        where = found
    return where


def job_place(view: GangView, page: str = OVERVIEW) -> Place:
    return Place(page, view.gang_id)


def test_one_look_at_a_job_says_what_it_does_and_what_happens_next() -> None:
    view = training()
    event = EventRecord(position=7, gang_id=view.gang_id, at_s=NOW, text="generation 4 is RUNNING")
    known = known_of(view, event)
    text = "\n".join(shown(known, job_place(view), NOW + 3, 80, 30))
    for words in (
        "pretraining-7b (42)  generation 4  RUNNING for 1.5 h", "last change 3 s ago", "3.2 h elapsed, 20.8 h left",
        "2027-01-16 04:38, in 20.6 h, the ranks stop for the time limit",
        "step 298 of 10,000; 1.25 s a step; done 2027-01-15 11:22", "loss 2.314 (2.301 to 2.33), lr 0.0003, MFU 41.2%",
        "1.25 s, compute 86%, wait for other ranks 8%, data 4%", "memory: step 297, 15 s ago  disk: step 290, 14.1 min",
        "93.1% of 3.2 h; lost: steps again 3.1%", "n3 LOST: n1 is lost", "rank 9 on n1 computes 30% longer",
        "31 running, 1 exited, 1 slow", "n999  4.5 s  30 ms   1.23 s  740 ms  1 s  ", "generation 4 is RUNNING",
    ):  # fmt: skip
        assert words in text


def test_a_job_that_waits_says_for_what() -> None:
    view = GangView(gang_id="g", phase="SUBMITTED", waiting_for="Slurm to start job 42", expected_start_s=NOW + 60)
    text = "\n".join(shown(known_of(view), job_place(view)))
    assert "waits for   Slurm to start job 42" in text
    assert "2027-01-15 08:01, in 60 s, as Slurm expects" in text


def test_a_job_that_has_ended_says_why_and_is_not_stale() -> None:
    view = gang(2, final=True)
    first, *rest = shown(known_of(view, "the coordinator has stopped"), job_place(view), NOW + 60)
    assert first.endswith("the job has ended")
    assert "rank 9 on node0007 exited with 1" in "\n".join(rest)
    assert "stopped" not in "\n".join(rest)


def test_a_recovery_is_under_way_until_its_first_step() -> None:
    view = gang(3)
    view.phase = "RECOVERING"
    view.recoveries[-1].first_step_s = view.recoveries[-1].started_s = 0.0
    newest, before = shown(known_of(view), job_place(view, RECOVERIES))[2:4]
    assert ("under way" in newest, "under way" in before) == (True, False)
    assert "4.5 s" in before


def test_the_troubled_ranks_come_first() -> None:
    view = training()
    view.ranks[20].state = "absent"
    view.ranks[21].step = 297
    lines = shown(known_of(view), job_place(view, RANKS))
    assert [line.split()[0] for line in lines[2:7]] == [">", "20", "9", "21", "0"]
    assert lines[2].split()[1:5] == ["3", "exited", "with", "1"]


def test_a_rank_that_has_finished_is_not_in_trouble() -> None:
    view = gang(2)
    view.ranks[0].state = "exited"
    view.ranks[1].state, view.ranks[1].exit_code = "exited", 1
    lines = shown(known_of(view), job_place(view, RANKS))
    assert lines[2].startswith("> 1     exited with 1")
    assert lines[17].startswith("  0     exited with 0")


def test_what_is_not_heard_any_more_is_never_shown_as_fresh() -> None:
    view = gang(2)
    known = known_of(view, "the coordinator at mgmt1:7070 has stopped")
    first, second, *_ = shown(known, job_place(view), NOW + 30)
    assert first.endswith("STALE, as of 30 s ago")
    assert second == "the coordinator at mgmt1:7070 has stopped"
    known.receive(Message(NOW + 31, view))
    lines = shown(known, job_place(view), NOW + 32)
    assert lines[0].endswith("last change 1 s ago")
    assert "STALE" not in lines[0]


def test_the_older_of_two_answers_dates_the_fleet() -> None:
    known = known_of(ListReply(gangs=jobs(3)))
    known.receive(Message(NOW + 20, NodesReply(nodes=site(4, 2))))
    assert shown(known, Place(), NOW + 20)[0].endswith("as of 20 s ago")


def test_a_job_of_the_fleet_on_one_line() -> None:
    view = training()
    lines = shown(known_of(ListReply(gangs=[view]), NodesReply()), Place())
    assert lines[1].split() == ["job", "name", "phase", "pace", "goodput", "recovery", "step"]
    assert lines[2] == "> 42   pretraining…  RUNNING  1.25 s a step  93.1%    06:30 4.5 s  298".ljust(80)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_every_page_fits_every_terminal(width: int, height: int) -> None:
    view = training()
    events = [EventRecord(position=at + 1, gang_id=view.gang_id, at_s=NOW, text="x" * 300) for at in range(40)]
    known = known_of(view, *events, ListReply(gangs=[view, *jobs(40)]), NodesReply(nodes=site(512, 16)))
    places = [job_place(view, page) for page in (OVERVIEW, RANKS, RECOVERIES, EVENTS, NODES, MAP)]
    places += [Place(page) for page in (JOBS, NODES, MAP)]
    for where in places:
        for one in (where, replace(where, keys_shown=True), replace(where, typing=True, wanted="n1")):
            lines = shown(known, one, NOW, width, height)
            assert len(lines) == height, one
            assert max(map(len, lines)) <= width, one


def test_512_nodes_fit_a_screen_of_80_columns_and_24_lines() -> None:
    nodes = site(512, 16)
    nodes[17].verdict = "LOST"
    text = "\n".join(shown(known_of(NodesReply(nodes=nodes)), Place(MAP)))
    assert text.count("................") == 31
    assert "leaf1 .L.............." in text
    assert "pod3" in text


def test_12500_nodes_fit_it_by_leaf() -> None:
    nodes = site(12_500, 32)
    for at in (0, 1, *range(64, 80)):
        nodes[at].verdict = "UNFIT"
    known = known_of(NodesReply(nodes=nodes))
    lines = shown(known, Place(MAP))
    cells = re.findall(r"(?<!\S)[·+1-9](?!\S)", " ".join(lines[2:-5]))
    assert (len(cells), cells[:3]) == (391, ["2", "·", "+"])
    where = pressed(known, Place(MAP), "right", "right")
    assert "leaf2 in pod0: 32 nodes: . free 16  U UNFIT 16" in "\n".join(shown(known, where))
    where = pressed(known, where, "enter")
    assert shown(known, where)[2].split()[1:3] == ["n64", "UNFIT"]
    assert pressed(known, where, "escape") == replace(where, leaf="", cursor="leaf2")


def test_each_health_and_each_role_has_a_letter_of_its_own() -> None:
    views = [NodeView(verdict=health) for health in (*NodeHealth, "UNHEARD") if health != "FIT"]
    views += [NodeView(verdict="FIT", role=role) for role in ("rank", "spare", "")]
    views.append(NodeView(verdict="FIT", slurm_job_ids=[4]))
    letters = [letter(view) for view in views]
    assert len(set(letters)) == len(letters)
    assert [sign for sign in letters if sign.isupper() or sign == "?"] == letters[:7]


def test_a_node_says_which_job_has_it() -> None:
    nodes = site(2, 2)
    nodes[0].slurm_job_ids.append(42)
    nodes[1].slurm_job_ids.append(7)
    known = known_of(NodesReply(nodes=nodes), ListReply(gangs=[training()]))
    assert [known.jobs_of(node) for node in known.nodes] == ["42 pretraining-7b", "7"]


def test_the_cursor_holds_on_to_its_record() -> None:
    view = training()
    known = known_of(view)
    where = pressed(known, job_place(view, RANKS), "down", "down")
    assert where.cursor == "0"
    view.ranks[30].state = "absent"
    known.receive(Message(NOW, view))
    assert next(line for line in shown(known, where) if line.startswith(">")).split()[1] == "0"


def test_only_what_contains_a_text() -> None:
    view = training()
    known = known_of(view)
    where = pressed(known, job_place(view, RANKS), "/", *"exitex", "backspace", "backspace")
    assert (where.typing, where.wanted) == (True, "exit")
    lines = shown(known, where)
    assert lines[-1].startswith("/exit_")
    assert [line.split()[1] for line in lines if "running" in line or "exited" in line] == ["3"]
    assert pressed(known, where, *"q" * 90).wanted == ("exit" + "q" * 90)[:FILTER_CHARS]
    assert not pressed(known, where, "escape").wanted
    kept = pressed(known, where, "enter")
    assert (kept.typing, kept.wanted) == (False, "exit")
    assert pressed(known, kept, "escape").wanted == ""
    assert "nothing matches 'exitz'" in "\n".join(shown(known, pressed(known, where, "z")))


def test_into_a_job_and_back_to_all() -> None:
    known = known_of(ListReply(gangs=jobs(12)), NodesReply(nodes=site(4, 2)))
    inside = pressed(known, Place(), "down", "enter")
    assert inside == Place(OVERVIEW, "gang-0001")
    ranks = pressed(known, inside, "r")
    assert ranks.page == RANKS
    assert pressed(known, ranks, "escape") == inside
    assert pressed(known, inside, "escape") == Place(JOBS, cursor="gang-0001")
    alone = Place(OVERVIEW, "gang-0001", only_job=True)
    assert pressed(known, alone, "escape") == alone
    node = pressed(known, Place(), "n", "down", "enter")
    assert "n1  FIT" in "\n".join(shown(known, node))
    assert pressed(known, node, "escape").page == NODES


def test_the_cursor_moves_over_the_map_and_stays_on_it() -> None:
    known = known_of(NodesReply(nodes=site(512, 16)))
    start = pressed(known, Place(), "m")
    assert pressed(known, start, "down").cursor == "n32"
    assert pressed(known, start, "right", "right").cursor == "n2"
    assert pressed(known, start, "left").cursor == "n0"
    assert pressed(known, start, "up").cursor == "n0"
    assert pressed(known, start, "end").cursor == "n480"
    assert pressed(known, start, "down", "left").cursor == "n31"


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_these_keys_end_it(key: str) -> None:
    assert press(Place(), key, key if len(key) == 1 else "", None) is None


def test_a_key_without_a_sense_changes_nothing() -> None:
    assert press(Place(), "f7", "", None) == Place()
    assert press(Place(), "z", "z", None) == Place()


def test_nothing_of_a_job_reaches_the_terminal_as_an_escape() -> None:
    view = training()
    view.name, view.reason = "evil\x1b]0;owned\x07", "a\nb"
    record = EventRecord(position=1, gang_id=view.gang_id, text="rank 0 said \x1b[2J")
    for page in (OVERVIEW, EVENTS):
        assert "\x1b" not in "".join(shown(known_of(view, record), job_place(view, page)))
    assert "\x1b" not in "".join(shown(known_of(ListReply(gangs=[view])), Place()))


def test_so_many_events_are_kept() -> None:
    records = [EventRecord(position=at + 1, gang_id="g") for at in range(EVENTS_KEPT + 5)]
    kept = known_of(*records).events_of("g")
    assert (len(kept), kept[0].position, kept[-1].position) == (EVENTS_KEPT, EVENTS_KEPT + 5, 6)


def test_jobs_that_ended_long_ago_are_listed_on_request_only() -> None:
    known = known_of(ListReply(gangs=jobs(64)))
    ended = [job for job in known.all_jobs if job.view.final and NOW - job.view.ended_s > 86_400]
    assert len(ended) > 5
    where = Place(JOBS)
    assert "40063" not in "\n".join(shown(known, where, NOW, 80, 90))
    for key in ("a", "a"):
        where = press(where, key, key, None) or where
        assert ("40063" in "\n".join(shown(known, where, NOW, 80, 90))) is where.ended_too
    assert not where.ended_too
    old = known_of(ListReply(gangs=[job.view for job in ended]))
    assert any("no job goes on" in line for line in shown(old, Place(JOBS), NOW, 80, 24))


CONTENTS: Sequence[GangView | EventRecord | ListReply | NodesReply | str] = (
    training(), EventRecord(position=3, text="é"), ListReply(gangs=jobs(2)), NodesReply(nodes=site(2, 1)),
    "it is silent",
)  # fmt: skip


def test_a_recording_says_what_was_received() -> None:
    messages = [Message(NOW + at, content) for at, content in enumerate(CONTENTS)]
    lines = [f"{to_line(message)}\n" for message in messages]
    assert read_recording(lines, "a file") == messages
    assert read_recording([*lines, lines[0][:50]], "a file") == messages  # its end was not written


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a.jsonl holds no messages"),
        ('{"at_s": 1, "view": {"phase": 3}}\n', "line 1 of a.jsonl is no message"),
        ('{"at_s": 1, "trouble": "x"}\n{"at_s": 1}\n', "line 2 of a.jsonl is no message"),
        ("[1]\n", "line 1 of a.jsonl is no message"),
        ('{"view": {}}\n', "line 1 of a.jsonl is no message"),
    ],
)
def test_what_is_no_recording_is_refused(text: str, words: str) -> None:
    with pytest.raises(WrongInput, match=words):
        read_recording(text.splitlines(keepends=True), "a.jsonl")


def test_the_page_for_users_has_the_keys() -> None:
    page = (ROOT / "docs" / "operations" / "day-to-day.md").read_text()
    for keys, words in KEYS:
        assert f"| {keys} | {words} |" in page


def test_no_word_about_a_key_is_cut_on_the_smallest_screen() -> None:
    page = " ".join(" ".join(shown(Known(), Place(JOBS, keys_shown=True))).split())
    assert all(f"{keys} {words}" in page for keys, words in KEYS)


RECORDING = Path(__file__).parent / "recordings" / "rank_killed_node_lost.jsonl"
"""Of `muster top --record` on the test cluster, with fewer views: a rank is killed, a node crashes, and the coordinator
is killed and starts again."""
PICTURES = ROOT / "docs" / "operations" / "pictures"


def recorded(until: Callable[[GangView | str], object]) -> tuple[Known, float]:
    """What is known once the job is so, and when that is."""
    known = Known()
    with RECORDING.open() as lines:
        for message in read_recording(lines, RECORDING.name):
            known.receive(message)
            if isinstance(message.content, GangView | str) and until(message.content):
                return known, message.at_s
    raise AssertionError(f"the job of {RECORDING.name} is never so")


def is_trained(content: GangView | str) -> bool:
    """Near its end, after all faults."""
    return isinstance(content, GangView) and content.phase == "RUNNING" and content.step > 400


def is_silent(content: GangView | str) -> bool:
    return isinstance(content, str)


def of_recorded_job(
    page: str, width: int, height: int, until: Callable[[GangView | str], object], later_s: float = 0.0
) -> str:
    known, at_s = recorded(until)
    return drawn(known, Place(page, *known.jobs), at_s + later_s, width, height)


def test_a_recorded_run_shows_what_failed_and_what_was_done_about_it() -> None:
    known, at_s = recorded(lambda content: isinstance(content, GangView) and content.final)
    where = Place(RECOVERIES, *known.jobs)
    lines = shown(known, where, at_s, 120, 40)
    assert lines[2].startswith("> 3    21:40:27  n1   n4  750 ms  402 ms  84.4 ms  0 s    0 s         0 s   264 ms ")
    assert lines[3].startswith("  2    21:40:20           291 ms  0 s     56.5 ms  0 s    0 s         0 s   234 ms ")
    assert "n1 is lost: agent and daemon silent" in "\n".join(lines[-5:])
    text = "\n".join(shown(known, replace(where, page=EVENTS, cursor=""), at_s, 120, 40))
    assert "generation 2 is fenced" in text
    assert "node n1 is LOST" in text


def busy_site(count: int, leaf: int) -> Known:
    """A site with two jobs, spares and some nodes in trouble."""
    nodes = site(count, leaf)
    for at, node in enumerate(nodes):
        node.slurm_job_ids.extend([42] if at < count // 2 else [43] if at < count * 3 // 4 else [])
        node.role = ("spare" if at % 64 == 63 else "rank") if node.slurm_job_ids == [42] else ""
    for verdict, step in (("LOST", 97), ("DEGRADED", 151), ("UNFIT", 211), ("RETURNING", 403)):
        for node in nodes[step // 2 :: step]:
            node.verdict, node.role, node.reason = verdict, "", LOST
    return known_of(ListReply(gangs=[training(), *jobs(6)]), NodesReply(nodes=nodes))


def drawn(known: Known, where: Place, now: float, width: int, height: int) -> str:
    """A picture of the screen."""
    moment = Moment(now, Screen(width, zone=UTC))
    body = pages.body_of(known, where, moment, width)
    lines = pages.picture(known, where, body, moment, width, height)
    painted = (
        "".join(svg.paint(cell.text, cell.colour) if cell.colour else cell.text for cell in one) for one in lines
    )
    return svg.svg_of((line or " " for line in painted), "muster top")


PICTURE_OF = {
    "top-job": lambda: of_recorded_job(OVERVIEW, 80, 24, is_trained),
    "top-job-wide": lambda: of_recorded_job(OVERVIEW, 120, 40, is_trained),
    "top-recoveries": lambda: of_recorded_job(RECOVERIES, 80, 24, is_trained),
    "top-stale": lambda: of_recorded_job(OVERVIEW, 80, 24, is_silent, 7.0),
    "top-jobs": lambda: drawn(busy_site(512, 16), Place(JOBS), NOW + 2, 80, 24),
    "top-map": lambda: drawn(busy_site(512, 16), Place(MAP, cursor="n97"), NOW + 2, 80, 24),
    "top-leaves": lambda: drawn(busy_site(12_500, 32), Place(MAP, cursor="leaf7"), NOW + 2, 120, 40),
}


@pytest.mark.parametrize("name", PICTURE_OF)
def test_the_pictures_of_the_documents_are_what_is_drawn(name: str) -> None:
    file, picture = PICTURES / f"{name}.svg", PICTURE_OF[name]()
    if os.environ.get("MUSTER_GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(picture)
    assert file.read_text() == picture, "MUSTER_GOLDEN=write draws them again: look at them"
