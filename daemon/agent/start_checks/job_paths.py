"""What a job's command needs of a host's file system: its working folder, its program, its script.

`muster submit` looks on the login node, before the queue, and each agent on its own node, before the first rank starts.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_INTERPRETER = re.compile(r"(python(3(\.\d+)?)?|bash|sh)")
_FLAGS = frozenset({"-u", "-O", "-B", "-E", "-I", "-P", "-s"})
"""Flags of interpreters after which a script follows."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that a job needs and this host lacks. `words`: what it is, and what is wrong with it. `right`: what
    would be right, if that is known.
    """

    path: Path
    words: str
    right: str = ""

    @property
    def full(self) -> str:
        """What is wrong, and what would be right."""
        return f"{self.words}: {self.right}" if self.right else self.words


def find_program(program: str, search_path: str, work_dir: str) -> str | None:
    """The file of a program in PATH. Relative folders of PATH begin at work_dir, where the ranks run."""
    folders = (os.path.join(work_dir, folder) for folder in search_path.split(os.pathsep))
    return shutil.which(program, path=os.pathsep.join(folders))


def find_missing(work_dir: str, command: Sequence[str], search_path: str) -> Iterator[Missing]:
    """What this host lacks for the command.

    Args:
        search_path: PATH of the command.
    """
    folder = Path(work_dir)
    has_folder = os.path.isdir(folder)
    if not has_folder:
        yield Missing(folder, f"work_dir = {work_dir!r} {_why_absent(folder) or 'is not a folder'}")
    program = command[0]
    if "/" not in program and find_program(program, search_path, work_dir) is None:
        is_here = has_folder and (folder / program).is_file()
        right = (
            f"write ./{program} for the file in {folder}"
            if is_here
            else "name its path, or set PATH (in job.toml: [env])"
        )
        shown = re.sub("=.*", "=...", program)  # of a shell's assignment: the value may be secret
        yield Missing(Path(program), f"command: no program {shown!r} is in PATH", right)
    for what, word, access, verb in _files(command):
        path = folder / word
        if not has_folder and not os.path.isabs(word):
            continue  # the folder alone is to be named
        if absent := _why_absent(path):
            yield Missing(path, f"command: the {what} {path} {absent}")
        elif _is_no_program(path):
            yield Missing(path, f"command: the {what} {path} is a folder")
        elif not os.access(path, access):
            yield Missing(path, f"command: the {what} {path} can't be {verb} by you")


def _why_absent(path: Path) -> str:
    """Why a path leads to nothing; empty: it leads to something. A folder above may be closed to this user."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return "does not exist"
    except OSError as error:
        return f"can't be reached: {error.strerror}"
    return ""


def _is_no_program(path: Path) -> bool:
    """Python runs a folder only if it finds this file in it."""
    return path.is_dir() and not os.path.exists(path / "__main__.py")


def _files(command: Sequence[str]) -> Iterator[tuple[str, str, int, str]]:
    """The program if it is a path, and the script that a known interpreter is given."""
    program, *words = command
    if "/" in program:
        yield "program", program, os.X_OK, "run"
    if not _INTERPRETER.fullmatch(program.rpartition("/")[2]):
        return
    for word in words:
        if word.startswith("-"):
            if word not in _FLAGS:
                return  # -m, -c, or an option with a value: the next word may be no script
        else:
            yield "script", word, os.R_OK, "read"
            return
