"""What a rank imports, as its zygote sees it: memory that both share, and that outlives a killed rank.

The rank writes words into it, in the order in which they count: the name of a module that the script imports itself, or
of a package that one of these imports; or `NAME=` for a variable of its environment that from there on is not what the
zygote has. No descriptor is open for that in the user's process, and no thread runs there. Standard library and syntax
of Python 3.9.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress

MOST_BYTES = 16384
"""Of the words of one rank. What comes later is not seen."""
_HEAD = struct.Struct("<II")
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_TARGETS: dict[str, frozenset[str]] = {}
"""Folders of PYTHONPATH that `pip install --target` has filled, with the modules there that pip knows."""


def find_targets(python_path: str) -> None:
    """Look for packages that pip has put into folders of PYTHONPATH. A zygote does so once: no rank reads a folder for
    that, and what a script puts there later counts as its own."""
    for folder in filter(os.path.isabs, python_path.split(os.pathsep)):
        try:
            names = frozenset(_recorded(folder))
        except OSError:
            continue
        if names:
            _TARGETS[os.path.join(folder, "")] = names


def _recorded(folder: str) -> Iterator[str]:
    for name in os.listdir(folder):
        if name.endswith(".dist-info"):
            yield from _top_names(os.path.join(folder, name))


def _top_names(package: str) -> set[str]:
    """top_level.txt is short, but not every package has it. RECORD has a line for each file."""
    for file in ("top_level.txt", "RECORD"):
        with suppress(OSError), open(os.path.join(package, file), encoding="utf-8", errors="replace") as lines:
            paths = (line.partition(",")[0].partition("/")[0] for line in lines)
            if names := {path.partition(".")[0].strip() for path in paths} - {""}:
                return names
    return set()


def is_installed(file: str) -> bool:
    """Whether a file belongs to the interpreter or to a package that was installed, and so to no script."""
    if file.startswith(_STANDARD_LIBRARY) or "/site-packages/" in file or "/dist-packages/" in file:
        return True
    return any(
        file.startswith(folder) and file[len(folder) :].partition(os.sep)[0].partition(".")[0] in names
        for folder, names in _TARGETS.items()
    )


class SeenImports:
    """The shared memory. It is made before the fork of the rank."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _HEAD.size + MOST_BYTES)

    def count(self) -> int:
        """How many modules the rank has looked for. It grows while an import runs, and not if the rank looks in each
        step for an optional module that is not there."""
        return int(_HEAD.unpack_from(self._memory)[0])

    def words(self) -> list[str]:
        """What the rank has written."""
        length = _HEAD.unpack_from(self._memory)[1]
        return self._memory[_HEAD.size : _HEAD.size + length].decode(errors="replace").split("\n")[:-1]

    def record(self, environment: Mapping[str, str]) -> None:
        """Write down what this process imports from now on. `environment`: the zygote's."""
        sys.meta_path.insert(0, _Recorder(self._memory, environment))


class _Recorder:
    """A finder that finds nothing, and so is asked for each module that is not there yet."""

    def __init__(self, memory: mmap.mmap, environment: Mapping[str, str]) -> None:
        self._memory, self._environment = memory, dict(environment)
        self._told: set[str] = set()
        self._sought: set[str] = set()
        self._pid = os.getpid()
        self._length = 0

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Write `name` down if the script imports it. What installed modules import comes with them; but one that must
        be left to the script may be slow because of packages that can do no harm."""
        if os.getpid() != self._pid or _is_question():
            return  # a worker of the rank, or nobody imports
        self._sought.add(name)
        if _is_package(name) or not _is_nested():
            for changed in self._changed_variables():
                self._tell(f"{changed}=")
            self._tell(name)
        _HEAD.pack_into(self._memory, 0, len(self._sought), self._length)

    def _changed_variables(self) -> list[str]:
        now, before = dict(os.environ), self._environment
        return [name for name in {**now, **before} if now.get(name) != before.get(name)]

    def _tell(self, word: str) -> None:
        data = f"{word}\n".encode(errors="replace")
        start = _HEAD.size + self._length
        if word not in self._told and "\n" not in word and start + len(data) <= len(self._memory):
            self._told.add(word)
            self._memory[start : start + len(data)] = data
            self._length += len(data)


def _is_package(name: str) -> bool:
    """Whether `name` is the first name of something outside of the standard library. Python 3.9 doesn't say so."""
    return "." not in name and name not in getattr(sys, "stdlib_module_names", (name,))


def _is_question() -> bool:
    """Whether somebody asks if a module is there (importlib.util.find_spec), as transformers does for tensorflow."""
    frame = sys._getframe(2).f_back
    return frame is not None and frame.f_globals.get("__name__") == "importlib.util"


def _is_nested() -> bool:
    """Whether the import that goes on is part of the import of an installed module."""
    frame = sys._getframe(2)
    while frame is not None:
        in_module = frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__"
        if in_module and is_installed(frame.f_code.co_filename):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
