"""The form of a daemon's log: text for people, JSON for a collector, or records of journald with fields.

What a line is about stands in `About`: the node, the job, the gang and its generation. What is the same for all lines
of a process is noted once (`about_all`); what differs is given with the line: `extra=about(gang=..., job=...)`.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from muster.daemon.host.plain_text import PlainFormatter, plain

LogForm = Literal["text", "json", "journal"]
FORMS: tuple[LogForm, ...] = get_args(LogForm)
VARIABLE = "MUSTER_LOG_FORMAT"
"""Names the form for agents, whose command line the user does not write."""
JOURNAL_SOCKET = "/run/systemd/journal/socket"
MOST_BYTES = 100_000
"""Of one record of journald: the kernel passes a datagram of this size with its default limits."""
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_KEY = "muster_about"

about_all: dict[str, Any] = {}
"""What all lines of this process are about."""


def about(**fields: Any) -> dict[str, Any]:
    """What one line is about, for the extra fields of a call to a logger."""
    return {_KEY: fields}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return about_all | getattr(record, _KEY, {})


class JsonFormatter(PlainFormatter):
    """One JSON object on each line: time (UTC), level, logger, message, what it is about, and a traceback if there is
    one."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": plain(record.getMessage()), **_fields(record)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class JournalHandler(logging.Handler):
    """Sends records to journald in its native form (systemd's "Native Journal Protocol"), with fields to search by:
    `journalctl MUSTER_JOB=4711`. Never waits: what journald does not take at once is lost."""

    def __init__(self, identifier: str, address: str = JOURNAL_SOCKET) -> None:
        """Raises OSError: nobody listens at `address`."""
        super().__init__()
        self._identifier, self._address = identifier, address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._socket.connect(address)
        except OSError:
            self._socket.close()
            raise
        self.setFormatter(PlainFormatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        try:
            message = self.format(record)
        except (TypeError, ValueError, LookupError):  # a bug of whoever logs
            self.handleError(record)
            return
        fields = {
            "MESSAGE": message,
            "PRIORITY": _PRIORITIES.get(record.levelno, 6),
            "SYSLOG_IDENTIFIER": self._identifier,
            "LOGGER": record.name,
            **{f"MUSTER_{key.upper()}": value for key, value in _fields(record).items()},
        }
        try:
            # To the address: the socket there may be another one by now.
            self._socket.sendto(b"".join(_native(key, str(value)) for key, value in fields.items()), self._address)
        except OSError:
            pass

    def close(self) -> None:
        """See logging.Handler."""
        self._socket.close()
        super().close()


def _native(key: str, value: str) -> bytes:
    """One field. The length stands before the value, which may then have several lines."""
    content = value.encode(errors="replace")[:MOST_BYTES]
    return key.encode() + b"\n" + len(content).to_bytes(8, "little") + content + b"\n"


def formatter(form: str, node: str = "") -> logging.Formatter:
    """For lines of a file or a pipe. `node`: stands before each line of text, where several nodes write into one."""
    return JsonFormatter() if form == "json" else PlainFormatter(node=node)


def handler(form: str, identifier: str, address: str = JOURNAL_SOCKET) -> logging.Handler:
    """Where a daemon logs to: standard error, or journald. Without journald: standard error, as text."""
    if form == "journal":
        try:
            return JournalHandler(identifier, address)
        except OSError as error:
            print(f"{identifier}: no journald at {address} ({error.strerror}): this log is text", file=sys.stderr)
    made = logging.StreamHandler(sys.stderr)
    made.setFormatter(formatter(form))
    return made


def named_form() -> str:
    """The form that the environment names, if it names one that exists; else text."""
    form = os.environ.get(VARIABLE, "")
    return form if form in FORMS else "text"
