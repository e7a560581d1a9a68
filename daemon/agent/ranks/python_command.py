"""Which interpreter, which interpreter flags and which script a job's command line names.

Pure. A command that this module does not understand is executed unchanged: nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

_INTERPRETER_NAME = re.compile(r"python(3(\.\d+)?t?)?$")
# Flags of CPython 3.11 to 3.14 that change how a script runs. Not listed: -i, -h, -V, -x, -?, --help and others, which
# do not just run a script.
_FLAGS_WITHOUT_VALUE = frozenset("bBdEIOPqsSuvR")
_FLAGS_WITH_VALUE = frozenset("WX")


class TargetKind(Enum):
    """How the command names the program."""

    SCRIPT = "script"
    MODULE = "module"  # -m
    CODE = "text"  # -c


@dataclass(frozen=True)
class PythonCommand:
    """`python FLAGS script ARGS`, `python FLAGS -m module ARGS` or `python FLAGS -c text ARGS`."""

    interpreter: str
    flags: tuple[str, ...]
    kind: TargetKind
    target: str
    arguments: tuple[str, ...]

    @property
    def safe_path(self) -> bool:
        """Whether a flag keeps the script's folder off sys.path."""
        return any(not flag.startswith("--") and set("IP") & set(flag[1:]) for flag in self._lone())

    def _lone(self) -> list[str]:
        return [flag for flag in self.flags if flag.startswith("-") and flag[1:2] not in _FLAGS_WITH_VALUE]


def parse_python_command(argv: Sequence[str], own_interpreter: str = "") -> PythonCommand | None:
    """Parse `argv` as a Python command. Return None if it is no Python command, or one that a zygote can't run.

    Args:
        own_interpreter: a path that counts as Python whatever its name is.
    """
    if not argv or not is_python(argv[0], own_interpreter):
        return None
    rest = list(argv[1:])
    flags: list[str] = []
    while rest:
        word = rest.pop(0)
        if word in ("-m", "-c"):
            kind = TargetKind.MODULE if word == "-m" else TargetKind.CODE
            return PythonCommand(argv[0], tuple(flags), kind, rest[0], tuple(rest[1:])) if rest else None
        if not word.startswith("-"):
            # Compiled scripts are rare: they are started by exec.
            script = PythonCommand(argv[0], tuple(flags), TargetKind.SCRIPT, word, tuple(rest))
            return None if word.endswith(".pyc") else script
        taken = _parse_flag(word, rest)
        if taken is None:
            return None
        flags += taken
    return None


def is_python(word: str, own_interpreter: str = "") -> bool:
    """Whether the first word of a command names a Python interpreter."""
    return word == own_interpreter or bool(_INTERPRETER_NAME.fullmatch(word.rpartition("/")[2]))


def _parse_flag(word: str, rest: list[str]) -> list[str] | None:
    """The words of one option (its value is taken from `rest`); None if this is no plain option."""
    letters = word[1:]
    if letters[:1] in _FLAGS_WITH_VALUE:
        if len(letters) > 1:
            return [word]
        return [word, rest.pop(0)] if rest else None
    return [word] if letters and set(letters) <= _FLAGS_WITHOUT_VALUE else None
