"""Names that reach Slurm's command lines, logs, journals and paths: one pattern for each kind, and one for lines.

No name begins with "-", so no program takes a name for an option. No name holds a blank, a comma, a bracket, a slash or
a control character, so no name becomes two, a list, a path or a line. Pure.
"""

from __future__ import annotations

import re
from typing import Final

_NODE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
"""A NodeName of slurm.conf. A host name has 253 characters at most."""
JOB: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""The name of a job in job.toml."""
_GANG: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""The id of a gang: the name of its job, the uid of its owner, and random digits (daemon/transport/gang_ids.py)."""
_READER: Final = re.compile(r"(group:)?[A-Za-z_][A-Za-z0-9_.@-]{0,63}")
"""Who may read a job: a login name, or a group after GROUP_PREFIX."""
GROUP_PREFIX: Final = "group:"
MOST_READERS: Final = 64
"""Readers of one job. A group stands for many."""
_WORD: Final = re.compile(r"[!-~]*")
_NOT_IN_A_LINE: Final = re.compile("[\x00-\x08\n-\x1f\x7f-\x9f\u2028\u2029]")
"""Control characters except the tab, and the line ends of Unicode."""


class InvalidName(ValueError):
    """A name that no node, gang or job has. The message says which names are allowed."""


def check_node(name: str) -> str:
    """Returns `name`, the name of one node.

    Raises:
        InvalidName: Slurm can have no node of this name.
    """
    return _check(_NODE, name, "the name of a node", "1 to 253 letters, digits, '.', '_' or '-'")


def check_gang(name: str) -> str:
    """Returns `name`, the id of a gang.

    Raises:
        InvalidName: no gang can have this id.
    """
    return _check(_GANG, name, "the id of a gang", "1 to 128 letters, digits, '.', '_' or '-'")


def check_job(name: str) -> str:
    """Returns `name`, the name of a job.

    Raises:
        InvalidName: no job can have this name.
    """
    return _check(JOB, name, "the name of a job", "1 to 64 letters, digits, '.', '_' or '-'")


def check_reader(name: str) -> str:
    """Returns `name`, which names a user or a group that may read a job.

    Raises:
        InvalidName: no user and no group can have this name.
    """
    right = 'a login name, or "group:" and the name of a Unix group'
    return _check(_READER, name, "a reader", right)


def check_word(name: str) -> str:
    """Returns `name`, which a process chose for itself: an incarnation, an address. It may be empty.

    Raises:
        InvalidName: it holds a blank, a control character, or one that is not ASCII.
    """
    if not _WORD.fullmatch(name):
        raise InvalidName(f"{name[:80]!r} must be one word of printable ASCII characters")
    return name


def is_one_line(text: str) -> bool:
    """Whether `text` can become a part of one line of a script."""
    return _NOT_IN_A_LINE.search(text) is None


def _check(pattern: re.Pattern[str], name: str, what: str, allowed: str) -> str:
    if not pattern.fullmatch(name):
        first = "a letter, a digit or '_'" if pattern is _NODE else "a letter or digit"
        raise InvalidName(f"{name[:80]!r} is not {what}: {allowed}, of which the first is {first}")
    return name
