"""Rows of the journal: facts and snapshots. A row is applied, or the journal says that it is damaged.

Checksums find what a disk has changed. A row whose checksum is right, from another version or an older format without
checksums, must not end the coordinator with anything but JournalError. Each line of an input is one row: the name of a
fact and its JSON. A line that begins with "{" is a snapshot.
"""

from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.journal.journal import JournalError, Record, parse_snapshot, replay_record


def check(data: bytes) -> None:
    """`data` as a whole journal."""
    state = DurableState()
    for position, line in enumerate(data.decode(errors="replace").split("\n"), 1):
        try:
            if line.startswith("{"):
                state = parse_snapshot(position, line, None)
            else:
                name, _, text = line.partition(" ")
                record = Record(position, 1000.0 + position, "", "", name, text, "", "")
                replay_record(state, record, position, None)
        except JournalError:
            return
    dumped = state.dump()
    assert len(dumped) <= 10_000 + 100 * len(data)
    assert DurableState.load(dumped).dump() == dumped
