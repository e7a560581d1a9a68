r"""One record of the kernel log: who wrote it, its message, and the error of which a message tells.

Pure: bytes in, data out. The formats, after the kernel's Documentation/ABI/testing/dev-kmsg:

    3,4711,98765,-;NVRM: words          8 * facility + level, sequence number, microseconds since boot, flag; message
    6,4712,98770,-,caller=T1;words      newer kernels add fields before the semicolon
     DEVICE=+pci:0000:18:00.0           a line with a space before it describes the record's device, and is ignored

The kernel gives its own records facility 0. It gives facility 1 or higher to whatever a program writes to /dev/kmsg,
and no program can choose 0. The kernel escapes control characters, "\" and all bytes above 126 as "\x0a", so a record
is one line, and a message with line breaks in it is one message.

A message may quote a user: a file name, a mount option, the name of a process. Only the start of a message is therefore
evidence of who printed it. The start of a fragment is none: it may be the name of a user's cgroup, because a record of
another processor has come between the parts of the line. The kernel flags a fragment "c" (before 4.9 also "+"). It also
flags so each whole line of a driver that marks all its messages as continuations, as NVIDIA's does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

KERNEL_FACILITY = 0
"""The facility of the kernel's own records (LOG_KERN)."""
_BARE_LINE_LEVEL = 6
"""The level of a line without a prefix (LOG_INFO)."""
_PREFIX = re.compile(rb"([0-9]{1,4}),([0-9]{1,20}),([0-9]{1,20}),([^,;\n]*)(?:,[^;\n]*)?;")
_ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")
_FRAGMENT_FLAGS = (b"c", b"+")


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """A record of the kernel log.

    `level`: 0 (emergency) to 7 (debug). `sequence`: the kernel's number of the record; None for a line without a
    prefix. `fragment`: the message may be a part of a line, and its start not the start of that line. `message`:
    unescaped, without a line break at its end. `at`: seconds since the boot; None for a line without a prefix.
    """

    facility: int
    level: int
    sequence: int | None
    fragment: bool
    message: str
    at: float | None = field(default=None, compare=False)


def parse_record(data: bytes) -> KernelRecord | None:
    """Return the record that one read of /dev/kmsg gave, or None if `data` has no prefix."""
    prefix = _PREFIX.match(data)
    if prefix is None:
        return None
    priority = int(prefix[1])
    message = data[prefix.end() :].partition(b"\n")[0]
    if b"\\" in message:
        message = _ESCAPE.sub(lambda found: bytes.fromhex(found[1].decode()), message)
    fragment, seconds = prefix[4] in _FRAGMENT_FLAGS, int(prefix[3]) / 1e6
    return KernelRecord(priority >> 3, priority & 7, int(prefix[2]), fragment, _text(message), seconds)


def parse_line(line: bytes) -> KernelRecord:
    """Return the record in a line of a file. A line without a prefix is the whole message of a record of the kernel."""
    record = parse_record(line)
    return record or KernelRecord(KERNEL_FACILITY, _BARE_LINE_LEVEL, None, False, _text(line))


def _text(message: bytes) -> str:
    return message.decode(errors="replace").rstrip("\n")


@dataclass(frozen=True, slots=True)
class KernelError:
    """One error in one message.

    `kind`, `code`: those of the coordinator's policy.toml. `device`: the PCI address as printed, in lower case, or the
    name of a disk, a network interface, a CPU or a memory controller; empty if the message has none. `text`: the
    message in one line, its control characters escaped.
    """

    kind: str
    code: int
    device: str
    text: str


def one_line(message: str) -> str:
    """`message` with its control characters escaped as the kernel escapes them."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in message)
