"""The batch script that is submitted: found and read as sbatch does. What can't be read is left to sbatch's own words.

`read` blocks, as storage does.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from muster.launcher.scripts.call import ScriptCall
from muster.slurm.client.sbatch_options import value_of

MOST_BYTES = 4 << 20
"""Slurm's own limit (max_script_size), unless a site has raised it."""
_SHEBANG = re.compile(r"#![ \t]*(\S+)[ \t]*(.*)")
_WRAPPED = "#!/bin/bash\n# This script was created by sbatch --wrap.\n\n{command}\n\n"
_MOST_WRAPPER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class UserScript:
    """A script that could be read."""

    text: str
    name: str
    """The job's name, if no option names it."""
    given: bytes | None = None
    """What sbatch gets on its standard input. None: it reads the file."""
    is_wrapped: bool = False


def read(call: ScriptCall) -> UserScript | None:
    """Reads the script; None: there is none that can be read.

    Raises:
        OSError: standard input can't be read.
    """
    if (command := value_of(call.options, "wrap")) is not None:
        text = _WRAPPED.format(command=command)
        return UserScript(text, "wrap", text.encode(errors="surrogateescape"), is_wrapped=True)
    if not call.script:
        data = sys.stdin.buffer.read()
        return UserScript(data.decode(errors="surrogateescape"), "sbatch", data)
    path = find(call.script, value_of(call.options, "chdir") or "", os.environ.get("PATH", os.defpath))
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError:
        return None
    if not path.is_file():  # a pipe, as of `muster submit <(...)`: nobody can read it again
        return UserScript(data.decode(errors="surrogateescape"), path.name, data)
    if not data.startswith(b"#!") or b"\0" in data or b"\r\n" in data or len(data) > MOST_BYTES:
        return None
    return UserScript(data.decode(errors="surrogateescape"), path.name)


def find(script: str, folder: str, search_path: str) -> Path:
    """The file that sbatch would take: below the job's folder, or else in PATH."""
    here = Path(folder, script)
    if here.exists() or script.startswith(("/", ".")):
        return here
    return next((place for part in search_path.split(":") if (place := Path(part, script)).is_file()), here)


def wrapper_text(word: str, folder: str) -> str:
    """The text of a shell script that a command names; empty: it is none."""
    path = Path(folder, word)
    try:
        if ("/" not in word and "." not in word) or not path.is_file() or path.stat().st_size > _MOST_WRAPPER_BYTES:
            return ""
        text = path.read_text(errors="replace")
    except (OSError, ValueError):
        return ""
    return text if word.endswith(".sh") or (_SHEBANG.match(text) and "sh" in text.partition("\n")[0]) else ""


def why_not_bash(text: str) -> str:
    """Why bash does not read what Muster adds before the script; empty: it does."""
    found = _SHEBANG.match(text)
    program, *words = f"{found[1]} {found[2]}".split() if found else [""]
    if program.endswith("/env"):
        words = [word for word in words if word not in ("-S", "-i")]
        program, *words = words or [""]
    if program.rpartition("/")[2] != "bash":
        return f"{program} runs the script, and Muster supervises scripts of bash"
    if any(word in ("--posix", "-p") or "posix" in word for word in words):
        return f"bash {' '.join(words)} reads no BASH_ENV"
    return ""


def missing_folder(pattern: str, folder: Path) -> str:
    """The folder of an output file, if it does not exist; empty: it does, or its name is known when the job runs."""
    place = folder / os.path.dirname(pattern)
    return str(place) if os.path.dirname(pattern) and "%" not in str(place) and not place.is_dir() else ""
