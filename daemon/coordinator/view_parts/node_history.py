"""A page of the history of one node, without the records that its reader may not see. Pure, except for `read`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.stored_names import stored_class
from muster.daemon.coordinator.journal.history import MOST_POSITION, Record

PAGE_RECORDS = 200
"""Records in one answer, at most."""
MOST_READS = 4
"""Pages of the journal that one answer may read: most of them may be of other users' jobs."""
NEWEST = MOST_POSITION
"""Before this position are all records."""
_FOR_OPERATORS = frozenset({stored_class(facts.NodeRegistered), stored_class(facts.NodeChecked)})
"""Records of no job that tell addresses, and what checks have found."""


def visible_page(
    read: Callable[[int, int], Sequence[Record]], may_read_gang: Callable[[str], bool], before: int, limit: int
) -> tuple[list[Record], int]:
    """The newest records before a position, and the position before which older ones are; 0: there are none.

    Args:
        read: at most so many records before a position, the newest first.
        may_read_gang: the reader may see the records of this gang; of an empty id: those that are for operators.
        before: 0: from the newest record on.
        limit: 0: as many as one answer has.
    """
    most, before = min(limit or PAGE_RECORDS, PAGE_RECORDS), before or NEWEST
    seen: list[Record] = []
    for _ in range(MOST_READS):
        page = read(before, PAGE_RECORDS)
        if not page:
            return seen, 0
        for record in page:
            before = record.position
            if _is_visible(record, may_read_gang):
                seen.append(record)
            if len(seen) == most:
                return seen, before
    return seen, before


def _is_visible(record: Record, may_read_gang: Callable[[str], bool]) -> bool:
    if not record.gang:
        return record.name not in _FOR_OPERATORS or may_read_gang("")
    return may_read_gang(record.gang)
