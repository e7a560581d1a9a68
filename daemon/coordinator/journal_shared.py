"""The journal in a folder that two machines share: a file for each term of the lease.

A machine that was cut off from the folder's server may still hold writes for a file that another has taken over, and
give them to the server when it is back, long after the process that made them has died. So nobody goes on in another's
file: whoever takes a term copies the newest journal, and late writes go to a file that nobody reads any more. The one
before is kept.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

ALONE = "journal.db"
"""The journal of a coordinator that has its folder to itself."""

_NAME = re.compile(r"journal-(\d+)\.db")
_BESIDE = ("-journal", "-wal")
"""Files of SQLite's own that belong to a database whose process was killed."""


def path_of(folder: Path, term: int) -> Path:
    """The journal of a term."""
    return folder / f"journal-{term:08d}.db"


def newest_term(folder: Path) -> int:
    """The highest term of which there is a journal in `folder`; 0: of none.

    Raises:
        OSError: the folder can't be read.
    """
    return max(_terms(folder), default=0)


def bring_over(folder: Path, term: int) -> None:
    """Copy the newest journal in `folder` for `term`; nothing is there afterwards where there was none.

    Raises:
        OSError: it can't be copied.
    """
    terms = sorted(_terms(folder))
    source = path_of(folder, terms[-1]) if terms else folder / ALONE
    if not source.exists():
        return
    target = path_of(folder, term)
    for ending in _BESIDE:
        _copy(Path(f"{source}{ending}"), Path(f"{target}{ending}"))
    _copy(source.with_suffix(".end"), target.with_suffix(".end"))
    aside = target.with_suffix(".new")
    _copy(source, aside)
    aside.rename(target)  # last: a journal with this name is whole


def remove_older(folder: Path, term: int) -> None:
    """Remove what belongs to terms before the one before `term`.

    Raises:
        OSError: it can't be removed.
    """
    before = sorted(older for older in _terms(folder) if older < term)[:-1]
    for path in [path_of(folder, older) for older in before]:
        for gone in (*(Path(f"{path}{ending}") for ending in _BESIDE), path.with_suffix(".end"), path):
            gone.unlink(missing_ok=True)


def _terms(folder: Path) -> list[int]:
    return [int(found[1]) for path in folder.iterdir() if (found := _NAME.fullmatch(path.name))]


def _copy(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    if not source.exists():
        return
    with source.open("rb") as read, open(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as write:
        shutil.copyfileobj(read, write, 1 << 20)
        write.flush()
        os.fsync(write.fileno())
