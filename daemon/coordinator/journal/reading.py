"""Reads one gang's records out of a journal, whether a coordinator still writes it or not. Changes nothing.

It needs no more than the file: no index of this version, and no lock. Whoever may read the file may read all of it.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from muster.daemon.coordinator.journal.history import COLUMNS, Record
from muster.daemon.coordinator.journal.per_term_journal import UNSHARED_JOURNAL, journal_path, newest_term

_GANG = "SELECT gang FROM facts WHERE name = 'GangRegistered' AND gang = ?"
_GANG_OF_JOB = """
SELECT gang FROM facts WHERE name = 'GangRegistered' AND json_extract(json, '$.job') = ? ORDER BY position DESC LIMIT 1
"""
_RECORDS = f"""
SELECT {COLUMNS} FROM facts WHERE gang = :gang
UNION ALL
SELECT {COLUMNS} FROM facts WHERE name = 'NodeJudged'
    AND node IN (SELECT node FROM facts WHERE gang = :gang AND name = 'MemberJoined')
    AND position BETWEEN (SELECT min(position) FROM facts WHERE gang = :gang)
        AND (SELECT max(position) FROM facts WHERE gang = :gang)
ORDER BY position
"""


class UnreadableJournal(Exception):
    """There is no journal, it can't be read, or it has no such job. The message says which."""


def read_gang(folder: Path, gang: str = "", job: int = 0) -> list[Record]:
    """All records of the gang of that id, or of the newest one of that Slurm job, with those of its nodes' health.
    `folder`: the coordinator's state folder, of which the newest journal is read.

    Raises:
        UnreadableJournal: see there.
    """
    path = _newest(folder)
    try:
        with closing(sqlite3.connect(_uri(path), uri=True)) as database:
            found = database.execute(_GANG if gang else _GANG_OF_JOB, (gang or job,)).fetchone()
            if found is None:
                raise UnreadableJournal(f"{path} has no job {gang or job}")
            return [Record(*row) for row in database.execute(_RECORDS, {"gang": found[0]})]
    except sqlite3.Error as error:
        raise UnreadableJournal(f"{path} can't be read: {error}") from None


def _newest(folder: Path) -> Path:
    try:
        term = newest_term(folder)
        path = journal_path(folder, term) if term else folder / UNSHARED_JOURNAL
        with path.open("rb"):
            return path
    except FileNotFoundError:
        raise UnreadableJournal(f"{folder} holds no journal: name the coordinator's --state-dir") from None
    except OSError as error:
        raise UnreadableJournal(f"{folder} can't be read: {error.strerror}") from None


def _uri(path: Path) -> str:
    """A journal that was closed is one file, and nothing at all is written beside it. One that was not has a log, which
    SQLite reads with the help of a file that it makes anew if it is not there."""
    log = Path(f"{path}-wal")
    has_log = log.exists() and log.stat().st_size > 0
    return f"file:{quote(str(path.absolute()))}?mode=ro{'' if has_log else '&immutable=1'}"
