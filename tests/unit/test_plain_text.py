"""What people see on a terminal or in a log: no text of a user moves the cursor, forges a line, or changes a title."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.daemon.host.plain_text import PlainFormatter, cut, plain, plain_but_coloured
from muster.launcher.commands.events import event_lines
from muster.launcher.output.job_list import gang_list
from muster.launcher.output.job_screen import one_screen
from muster.launcher.output.json_text import to_json
from muster.launcher.output.node_tables import node_lines
from muster.launcher.output.rank_logs import RankLogReader, Wanted
from muster.launcher.output.screen import Screen
from muster.launcher.output.tables import gang_details, recovery_table
from muster.v1.api_pb2 import EventRecord, GangView, NodeView

HOSTILE = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from("\x1b\x9b\x07\x08\x0b\x0c\r\n\t\x7f\x00\u2028\u202e\u2066"),
    ),
    min_size=1,
    max_size=20,
).map(lambda text: f"{text}\x1b[2J\x1b]0;title\x07\r\n{text}")
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Control characters except the line end."""


def _fill(message: Message, text: str) -> None:
    """Set every text of `message`, and one entry of each list and of each map from texts to numbers."""
    for field in message.DESCRIPTOR.fields:
        repeated = field.is_repeated
        if field.type == FieldDescriptor.TYPE_STRING:
            getattr(message, field.name).append(text) if repeated else setattr(message, field.name, text)
        elif field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)[text] = 1
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            _fill(getattr(message, field.name).add() if repeated else getattr(message, field.name), text)


@settings(max_examples=30)
@given(HOSTILE, st.booleans(), st.sampled_from([None, 80, 200]))
def test_no_table_passes_a_control_character_on(text: str, final: bool, width: int | None) -> None:
    view, record = GangView(final=final), EventRecord()
    _fill(view, text)
    _fill(record, text)
    view.nodes.add().CopyFrom(view.nodes[0])
    screen = Screen(width)
    tables = [*gang_details(view, screen), *gang_list([view], screen), *recovery_table(view.recoveries, screen)]
    tables += one_screen(view, screen, 1.0)
    lines = [*tables, *node_lines(view.nodes, screen), *event_lines(record, screen), to_json(view)]
    for line in lines:
        assert CONTROL.search(line if width else line.replace("\t", " ")) is None
        assert "\n" not in line


def test_a_reason_forges_no_row() -> None:
    view = NodeView(node="n1", verdict="LOST", reason="silent\nn2    FIT")
    assert len(list(node_lines([view], Screen()))) == 2


@given(HOSTILE)
def test_a_text_of_a_message_is_one_line_of_the_log(text: str) -> None:
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setFormatter(PlainFormatter("%(levelname)s %(message)s"))
    handler.handle(logging.LogRecord("muster", logging.INFO, "", 1, "a gang: %s", (text,), None))
    [line] = output.getvalue().removesuffix("\n").split("\n")
    assert CONTROL.search(line) is None


def test_a_line_of_a_log_has_its_date_and_zone() -> None:
    record = logging.LogRecord("muster", logging.INFO, "", 1, "words", (), None)
    line = PlainFormatter().format(record)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d INFO    muster: words", line)
    assert datetime.fromisoformat(line[:29]).timestamp() == pytest.approx(record.created, abs=0.001)


def test_a_line_in_a_file_of_several_nodes_begins_with_its_node() -> None:
    record = logging.LogRecord("muster", logging.INFO, "", 1, "words", (), None)
    assert re.match(r"n7 \d{4}-\d\d-\d\d .* muster: words", PlainFormatter(node="n7").format(record))


def test_a_traceback_keeps_its_lines_and_forges_none() -> None:
    try:
        raise ValueError("bad\n00:00:00 CRITICAL forged \x1b[2J")
    except ValueError as error:
        record = logging.LogRecord("muster", logging.ERROR, "", 1, "a bug", (), (ValueError, error, None))
    first, *others = PlainFormatter("%(message)s").format(record).split("\n")
    assert first == "a bug"
    assert len(others) == 2
    assert all(line.startswith("  ") for line in others)
    assert CONTROL.search("".join(others)) is None


def _lines(folder: Path, log: bytes) -> Iterator[str]:
    (folder / "g1").mkdir()
    (folder / "g1" / "rank0.log").write_bytes(log)
    return RankLogReader(folder, Wanted()).lines(to_end=True)


def test_the_log_of_a_rank_keeps_its_colours_and_nothing_else(tmp_path: Path) -> None:
    log = b"\x1b[1;31mloss\x1b[0m\t1.0\n\x1b]0;title\x07\x1b[2J\x1b[3Ahidden\n 10%\r 20%\r\n"
    assert list(_lines(tmp_path, log)) == [
        "g1 rank 0: \x1b[1;31mloss\x1b[0m\t1.0\x1b[0m\n",
        "g1 rank 0: \\x1b]0;title\\x07\\x1b[2J\\x1b[3Ahidden\n",
        "g1 rank 0:  10%\n",
        "g1 rank 0:  20%\n",
    ]


@given(HOSTILE)
def test_a_line_of_a_rank_has_only_colours(text: str) -> None:
    line = plain_but_coloured(text)
    assert CONTROL.search(re.sub("\x1b\\[[0-9;:]*m|\t", "", line)) is None
    assert "\n" not in line


@given(HOSTILE, st.integers(1, 50))
def test_a_cut_text_is_plain_and_no_longer(text: str, most: int) -> None:
    assert len(cut(text, most)) <= most + len("...")
    assert cut(text, 10_000) == plain(text)
    assert plain(plain(text)) == plain(text)


@pytest.mark.parametrize("text", ["", "Xid 79: fallen off the bus", "größer 漢字 🙂"])
def test_an_ordinary_text_stays_as_it_is(text: str) -> None:
    assert plain(text) == plain_but_coloured(text) == cut(text, 100) == text
