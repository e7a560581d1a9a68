"""Reads pages of the journal for the events API. A page costs by what it returns, not by the size of the journal.

Pages are read on the event loop, so each of them is bounded in records and in bytes. The indexes are no part of a
journal's format: an older version reads a journal that has them, and this version adds them to a journal that lacks
them.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

MOST_POSITION = (1 << 63) - 1
"""The largest whole number that SQLite holds."""

COLUMNS = "position, at, gang, node, name, json, text, cause"

INDEXES = (
    "CREATE INDEX IF NOT EXISTS registrations_of_gang ON facts (gang) WHERE name = 'GangRegistered'",
    "CREATE INDEX IF NOT EXISTS nodes_of_gang ON facts (gang, node) WHERE name = 'MemberJoined'",
    "CREATE INDEX IF NOT EXISTS verdicts_of_node ON facts (node, position) WHERE name = 'NodeJudged'",
    "CREATE INDEX IF NOT EXISTS records_of_node ON facts (node, position) WHERE node <> ''",
)

OF_ALL = f"SELECT {COLUMNS} FROM facts WHERE position > :after ORDER BY position LIMIT :limit"
# The history of a gang includes the changes of its nodes' health. Both parts are read through an index (INDEXED BY: an
# error if it can't serve). A NodeJudged has no gang, so no record is in both parts.
OF_GANG = f"""
SELECT {COLUMNS} FROM facts INDEXED BY facts_of_gang WHERE gang = :gang AND position > :after
UNION ALL
SELECT {COLUMNS} FROM facts INDEXED BY verdicts_of_node WHERE name = 'NodeJudged'
    AND node IN (SELECT node FROM facts INDEXED BY nodes_of_gang WHERE gang = :gang AND name = 'MemberJoined')
    AND position > max(:after, (SELECT coalesce(min(position), 0) FROM facts WHERE gang = :gang))
ORDER BY position LIMIT :limit
"""
OF_NODE = f"""
SELECT {COLUMNS} FROM facts INDEXED BY records_of_node WHERE node = :node AND node <> '' AND position < :before
ORDER BY position DESC LIMIT :limit
"""
_REGISTERED = "gang, json_extract(json, '$.owner_uid'), json_extract(json, '$.spec.readers')"
# The newest registration counts: that of a user's own script is complete once the script launches.
_OF_GANG = """
FROM facts INDEXED BY registrations_of_gang
WHERE name = 'GangRegistered' AND gang = ? ORDER BY position DESC LIMIT 1
"""
OWNER_OF_GANG = f"SELECT {_REGISTERED} {_OF_GANG}"
REGISTRATION = f"SELECT {COLUMNS} {_OF_GANG}"
OWNER_OF_JOB = f"""
SELECT {_REGISTERED} FROM facts
WHERE name = 'GangRegistered' AND json_extract(json, '$.job') = ? ORDER BY position DESC LIMIT 1
"""

REGISTERED_GANGS = """
SELECT DISTINCT gang FROM facts INDEXED BY registrations_of_gang WHERE name = 'GangRegistered' ORDER BY position DESC
"""


@dataclass(frozen=True, slots=True)
class Record:
    """One fact. `gang` is empty if the fact concerns a node alone, `node` if the fact names no node.
    `cause`: the event that led to the fact, in words."""

    position: int
    at: float
    gang: str
    node: str
    name: str
    json: str
    text: str
    cause: str


def read_page(
    database: sqlite3.Connection, gang: str, after: int, limit: int, most_chars: int | None = None
) -> list[Record]:
    """At most `limit` records after position `after` that concern `gang` (empty: all records), in order.

    With `most_chars`, the page ends before the record with which its JSON, texts and causes would be longer. Its first
    record may be longer than that, so no page is empty before the end.

    Raises:
        sqlite3.Error: the journal can't be read.
    """
    wanted = {"after": after, "limit": limit} | ({"gang": gang} if gang else {})
    return _page(database, OF_GANG if gang else OF_ALL, wanted, most_chars)


def read_node_page(
    database: sqlite3.Connection, node: str, before: int, limit: int, most_chars: int | None = None
) -> list[Record]:
    """At most `limit` records before position `before` that name `node`, the newest first. `most_chars`: see read_page.

    Raises:
        sqlite3.Error: the journal can't be read.
    """
    return _page(database, OF_NODE, {"node": node, "before": before, "limit": limit}, most_chars)


def _page(
    database: sqlite3.Connection, statement: str, wanted: Mapping[str, object], most_chars: int | None
) -> list[Record]:
    page: list[Record] = []
    chars = 0
    with closing(database.execute(statement, wanted)) as rows:
        for record in (Record(*row) for row in rows):
            chars += len(record.json) + len(record.text) + len(record.cause)
            if page and most_chars is not None and chars > most_chars:
                break
            page.append(record)
    return page


class Registered(NamedTuple):
    """A gang that was registered: who may read it."""

    gang: str
    owner_uid: int
    readers: tuple[str, ...] = ()


def find_owner(database: sqlite3.Connection, gang: str, job: int) -> Registered | None:
    """Gang `gang`, or the newest gang of Slurm job `job`; None if none was registered.

    Raises:
        sqlite3.Error: the journal can't be read.
    """
    row = database.execute(OWNER_OF_GANG if gang else OWNER_OF_JOB, (gang or job,)).fetchone()
    return Registered(str(row[0]), int(row[1]), tuple(json.loads(row[2] or "[]"))) if row else None


def read_registration(database: sqlite3.Connection, gang: str) -> Record | None:
    """The newest registration of a gang; None: there is none.

    Raises:
        sqlite3.Error: the journal can't be read.
    """
    row = database.execute(REGISTRATION, (gang,)).fetchone()
    return Record(*row) if row else None
