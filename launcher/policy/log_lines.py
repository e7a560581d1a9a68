r"""Lines of a saved kernel log, in the formats in which tools print it.

    3,4711,98765,-;NVRM: words                        /dev/kmsg
    <3>[   98.765432] NVRM: words                     dmesg --raw
    kern  :err   : [   98.765432] NVRM: words         dmesg --decode, with any time of dmesg
    [   98.765432] NVRM: words                        dmesg
    [Wed Nov 25 12:00:00 2026] NVRM: words            dmesg --ctime
    [Nov25 12:00] NVRM: words                         dmesg --human, also [  +0.000005]: without a time
    [   98.765432 <    0.000005>] NVRM: words         dmesg --show-delta, also [<    0.000005>]: without a time
    [   98.765432] node1 kernel: NVRM: words          journalctl -k -o short-monotonic
    2026-11-25T12:00:00+0100 node1 kernel: NVRM: w.   journalctl -k -o short-iso, dmesg --time-format iso, syslog
    Nov 25 12:00:00 node1 kernel: NVRM: words         journalctl -k, also -o short-precise; syslog
    Wed 2026-11-25 12:00:00 CET node1 kernel: NVRM:   journalctl -k -o short-full: the time counts as UTC
    1795608000.000000 node1 kernel: NVRM: words       journalctl -k -o short-unix
    {"SYSLOG_FACILITY":"0","MESSAGE":"NVRM: words"}   journalctl -k -o json
    NVRM: words                                       a message alone

Only /dev/kmsg, --raw, --decode and JSON say who wrote the record. In the others every message counts as the kernel's,
although programs can write to its log, and a line break that the kernel quotes begins a line of its own. So a saved log
may show more errors than the daemon sees.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime

from muster.daemon.node.kernel.kernel_record import KERNEL_FACILITY, KernelRecord, parse_line

MAX_LINE_BYTES = 8192
"""The longest record of the kernel's log (CONSOLE_EXT_LOG_MAX)."""
_RAW = re.compile(rb"[0-9]{1,4},[0-9]{1,20},(?P<microseconds>[0-9]{1,18}),[^;\n]*;")
_CALLER = rb"(?: ?\[ *[TC][0-9]{1,10}\])? "
_DELTA = rb"<? *\+?[0-9]{1,12}\.[0-9]{1,9}>?"
_SECONDS = rb"\[ *(?P<seconds>[0-9]{1,12}\.[0-9]{1,9})(?: " + _DELTA + rb")?\]" + _CALLER
_PRIORITY = re.compile(rb"<(?P<priority>[0-9]{1,4})>" + _SECONDS)
_DECODED = re.compile(rb"(?P<facility>[a-z0-9]{1,8}) *:[a-z]{1,8} *: ")
_SINCE_BOOT = re.compile(_SECONDS + rb"(?:\S{1,255} kernel: )?")
_CTIME = re.compile(
    rb"\[(?P<words>[A-Z][a-z]{2} [A-Z][a-z]{2} [ 0-9][0-9] [0-9:]{8} [0-9]{4})(?: " + _DELTA + rb")?\]" + _CALLER
)
_ISO = re.compile(
    rb"(?P<words>[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:]{8}(?:[.,][0-9]{1,9})?(?:Z|[+-][0-9]{2}:?[0-9]{2})?)"
    rb" (?:\S{1,255} kernel: (?:\[ *[0-9.]{1,22}\] )?)?"
)
_HUMAN = re.compile(rb"\[(?:[A-Z][a-z]{2} ?[0-9 ][0-9] [0-9]{2}:[0-9]{2}| *(?=[+<])" + _DELTA + rb")\]" + _CALLER)
_FULL = re.compile(
    rb"[A-Z][a-z]{2} (?P<words>[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8}(?:\.[0-9]{1,6})?) [A-Z0-9+-]{1,6} \S{1,99} kernel: "
)
_UNIX = re.compile(rb"(?P<words>[0-9]{1,12}\.[0-9]{6}) \S{1,255} kernel: ")
_SYSLOG = re.compile(
    rb"(?P<words>[A-Z][a-z]{2} [ 0-9][0-9] [0-9:]{8})(?:\.[0-9]{1,9})? \S{1,255} kernel: (?:\[ *[0-9.]{1,22}\] )?"
)
_ANY_LEAP_YEAR = "2000"
"""syslog prints no year. A leap year has all days."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line. `at`: seconds since the boot or since 1970, or since the start of some year; None: the line says no
    time. `time`: that as printed in the log."""

    record: KernelRecord
    at: float | None
    time: str


def read_line(line: bytes) -> LogLine:
    """Read a line without its end. A line of no known format is a message without a time."""
    if found := _RAW.match(line):
        seconds = int(found["microseconds"]) / 1e6
        return LogLine(parse_line(line), seconds, f"{seconds:.6f}")
    if found := _PRIORITY.match(line):
        priority = int(found["priority"])
        return _since_boot(line, found, priority >> 3)
    if line.startswith(b'{"') and (journal := _journal(line)):
        return journal
    if found := _DECODED.match(line):
        facility = KERNEL_FACILITY if found["facility"] == b"kern" else KERNEL_FACILITY + 1
        return _with_time(line[found.end() :], facility)
    return _with_time(line, KERNEL_FACILITY)


def _with_time(line: bytes, facility: int) -> LogLine:
    """A line that begins with a time of any format, or with none."""
    if found := _SINCE_BOOT.match(line):
        return _since_boot(line, found, facility)
    for pattern, read in ((_CTIME, _ctime), (_ISO, _iso), (_SYSLOG, _syslog), (_FULL, _iso), (_UNIX, float)):
        if (found := pattern.match(line)) and (at := read(found["words"].decode())) is not None:
            return LogLine(_record(line[found.end() :], facility), at, found["words"].decode())
    human = _HUMAN.match(line)
    return LogLine(_record(line[human.end() if human else 0 :], facility), None, "")


def _journal(line: bytes) -> LogLine | None:
    """An entry of the journal. None: the line is none. A message that is no UTF-8 is a list of bytes there."""
    try:
        entry = json.loads(line)
        message, at = entry["MESSAGE"], int(entry["__REALTIME_TIMESTAMP"]) / 1e6
        text = bytes(message) if isinstance(message, list) else str(message).encode(errors="replace")
        of_kernel = entry.get("_TRANSPORT", "kernel") == "kernel"
        facility = int(entry.get("SYSLOG_FACILITY", KERNEL_FACILITY)) if of_kernel else KERNEL_FACILITY + 1
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return LogLine(_record(text, facility), at, f"{at:.6f}")


def _since_boot(line: bytes, found: re.Match[bytes], facility: int) -> LogLine:
    return LogLine(_record(line[found.end() :], facility), float(found["seconds"]), found["seconds"].decode())


def _record(message: bytes, facility: int) -> KernelRecord:
    """A record with this whole message, even if the message looks like a record of /dev/kmsg."""
    return KernelRecord(facility, 6, None, False, message.decode(errors="replace"))


def _ctime(words: str) -> float | None:
    return _timestamp(words, "%a %b %d %H:%M:%S %Y")


def _syslog(words: str) -> float | None:
    return _timestamp(f"{_ANY_LEAP_YEAR} {words}", "%Y %b %d %H:%M:%S")


def _timestamp(words: str, format_: str) -> float | None:
    try:
        return datetime.strptime(words, format_).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _iso(words: str) -> float | None:
    try:
        moment = datetime.fromisoformat(words.replace(",", "."))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
