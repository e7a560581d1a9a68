"""The form of a daemon's log: JSON lines for a collector, and records of journald with fields."""

import json
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.daemon.host.process import log_format
from muster.daemon.host.process.log_format import JournalHandler, JsonFormatter, about, handler


@pytest.fixture(autouse=True)
def about_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_format, "about_all", {"node": "n1"})


@pytest.fixture
def journald(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "journal"))
        server.setblocking(False)
        yield server


def record(text: str = "a %s", *arguments: object, level: int = logging.INFO, **extra: object) -> logging.LogRecord:
    made = logging.getLogger("muster.test").makeRecord(
        "muster.test", level, "f.py", 1, text, arguments or ("word",), None, extra=extra
    )
    made.created = 1_796_000_000.25
    return made


def fields(packet: bytes) -> dict[str, str]:
    """Reads journald's native form."""
    found = {}
    while packet:
        key, rest = packet.split(b"\n", 1)
        length = int.from_bytes(rest[:8], "little")
        found[key.decode()] = rest[8 : 8 + length].decode()
        assert rest[8 + length : 9 + length] == b"\n"
        packet = rest[9 + length :]
    return found


def test_a_line_of_json_says_what_it_is_about() -> None:
    line = JsonFormatter().format(record(**about(job=42, generation=3)))
    assert json.loads(line) == {
        "time": "2026-11-30T00:53:20.250+00:00", "level": "info", "logger": "muster.test", "message": "a word",
        "node": "n1", "job": 42, "generation": 3,
    }  # fmt: skip


def test_a_line_stays_one_line_whatever_it_quotes() -> None:
    made = record("%s", 'two\nlines "quoted" \x1b[31m')
    try:
        raise ValueError("of\na user")
    except ValueError:
        made.exc_info = sys.exc_info()
    line = JsonFormatter().format(made)
    assert "\n" not in line
    assert json.loads(line)["message"] == 'two\\nlines "quoted" '
    assert "ValueError: of" in json.loads(line)["traceback"]


def test_the_fields_of_a_line_come_before_those_of_the_process() -> None:
    assert json.loads(JsonFormatter().format(record(**about(node="n9"))))["node"] == "n9"


def test_a_journald_whose_socket_was_made_anew_gets_the_next_record(journald: socket.socket) -> None:
    sender, address = JournalHandler("musterd", journald.getsockname()), journald.getsockname()
    journald.close()
    sender.emit(record("%s", "lost"))
    Path(address).unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as newer:
        newer.bind(address)
        newer.setblocking(False)
        sender.emit(record("%s", "found"))
        assert fields(newer.recv(1 << 16))["MESSAGE"] == "found"
    sender.close()


def test_journald_gets_fields(journald: socket.socket) -> None:
    sender = JournalHandler("musterd", journald.getsockname())
    sender.emit(record("%s", "two\nlines", level=logging.WARNING, **about(job=42)))
    sender.close()
    assert fields(journald.recv(1 << 20)) == {
        "MESSAGE": "two\\nlines", "PRIORITY": "4", "SYSLOG_IDENTIFIER": "musterd", "LOGGER": "muster.test",
        "MUSTER_NODE": "n1", "MUSTER_JOB": "42",
    }  # fmt: skip


def test_a_journald_that_takes_nothing_holds_nobody_up(journald: socket.socket) -> None:
    sender = JournalHandler("musterd", journald.getsockname())
    for _ in range(10_000):
        sender.emit(record())
    sender.close()
    assert fields(journald.recv(1 << 20))["MESSAGE"] == "a word"


@pytest.mark.parametrize("message", ["%d jobs", "%s and %s", "%(name)s", "100 %"])
def test_a_line_whose_words_do_not_fit_its_values_ends_nothing(
    journald: socket.socket, capsys: pytest.CaptureFixture[str], message: str
) -> None:
    sender = JournalHandler("musterd", journald.getsockname())
    sender.emit(record(message, "x"))
    assert "Logging error" in capsys.readouterr().err
    sender.emit(record("%s", "a word"))
    sender.close()
    assert fields(journald.recv(1 << 20))["MESSAGE"] == "a word"


def test_a_very_long_message_is_cut(journald: socket.socket) -> None:
    sender = JournalHandler("musterd", journald.getsockname())
    sender.emit(record("%s", "x" * 1_000_000))
    sender.close()
    assert len(fields(journald.recv(1 << 20))["MESSAGE"]) == log_format.MOST_BYTES


def test_without_journald_the_log_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = handler("journal", "musterd", str(tmp_path / "none"))
    assert isinstance(made, logging.StreamHandler)
    assert "musterd: no journald at" in capsys.readouterr().err


@pytest.mark.parametrize(("named", "form"), [("json", "json"), ("", "text"), ("xml", "text")])
def test_the_environment_names_the_form(monkeypatch: pytest.MonkeyPatch, named: str, form: str) -> None:
    monkeypatch.setenv(log_format.VARIABLE, named)
    assert log_format.named_form() == form


def test_a_daemon_logs_json(tmp_path: Path) -> None:
    """As its entry point starts the log."""
    code = (
        "import logging; from muster.daemon.transport.site_config import start_logging; "
        "start_logging('info', 'json', 'musterd', node='n7'); logging.getLogger('muster.node').info('starts')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line = json.loads(done.stderr)
    assert (line["message"], line["node"], line["logger"]) == ("starts", "n7", "muster.node")
