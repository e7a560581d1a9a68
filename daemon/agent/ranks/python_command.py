"""What a job's command line says to Python: which interpreter, which of its flags, which script.

Pure. A command that is not understood here is executed as it stands: nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

_NAME = re.compile(r"python(3(\.\d+)?t?)?$")
# Flags of CPython 3.11 to 3.14 that change how a script runs. Not here: -i, -h, -V, -x, -?, --help and the like, which
# ask for something else than to run a script.
_LONE = frozenset("bBdEIOPqsSuvR")
_WITH_VALUE = frozenset("WX")


class TargetKind(StrEnum):
    """How the program is named."""

    SCRIPT = "script"
    MODULE = "module"  # -m
    CODE = "text"  # -c


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """`python FLAGS script ARGS`, `python FLAGS -m module ARGS` or `python FLAGS -c text ARGS`."""

    interpreter: str
    flags: tuple[str, ...]
    kind: TargetKind
    target: str
    arguments: tuple[str, ...]

    @property
    def safe_path(self) -> bool:
        """Whether a flag forbids to put the script's folder on sys.path."""
        return any(not flag.startswith("--") and set("IP") & set(flag[1:]) for flag in self._lone())

    def _lone(self) -> list[str]:
        return [flag for flag in self.flags if flag.startswith("-") and flag[1:2] not in _WITH_VALUE]


def parse_python_command(argv: Sequence[str], own_interpreter: str = "") -> PythonCommand | None:
    """`argv` as a Python command, or None where it is none, or one that the warm process can't stand in for.

    `own_interpreter` is a path that counts as Python whatever its name.
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
            # Compiled scripts are rare enough to be started cold.
            script = PythonCommand(argv[0], tuple(flags), TargetKind.SCRIPT, word, tuple(rest))
            return None if word.endswith(".pyc") else script
        taken = _flag(word, rest)
        if taken is None:
            return None
        flags += taken
    return None


def is_python(word: str, own_interpreter: str = "") -> bool:
    """Whether a command's first word is a Python interpreter, by its name."""
    return word == own_interpreter or bool(_NAME.fullmatch(word.rpartition("/")[2]))


def _flag(word: str, rest: list[str]) -> list[str] | None:
    """The words of one option (its value is taken from `rest`), or None where it is not a plain one."""
    letters = word[1:]
    if letters[:1] in _WITH_VALUE:
        if len(letters) > 1:
            return [word]
        return [word, rest.pop(0)] if rest else None
    return [word] if letters and set(letters) <= _LONE else None
