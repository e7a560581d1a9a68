"""Who has submitted a gang, and how much of the journal a gang, or all gangs of a user, have used lately.

The journal keeps every record for good, and the owner of a job can cause as many as they like: flush after flush,
ranks that crash after each step, agents that are started anew. So each record of a gang counts in bytes, for the gang
and for its owner, and `circuit_breaker` holds the sums against the site's limits.

What was counted fades: after FADES_S seconds 37 % (1/e) of it counts still. So a limit of 64 MiB allows 64 MiB at once,
and 64 MiB in each further day. The records of a large gang name each of its nodes and ranks, and count as much less as
the gang is larger (`counted_bytes`).
"""

from dataclasses import dataclass, field
from math import exp, log

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.events import MAX_CAUSE_BYTES
from muster.daemon.coordinator.core.state.fact_text import describe

FADES_S = 86400.0
"""Seconds in which what was counted fades to 1/e. A bad day of a job, with hundreds of recoveries, is one burst."""
ROW_BYTES = MAX_CAUSE_BYTES + 512
"""Bytes of a record besides its JSON and its text: the longest cause, names, and its entries in the indexes. Most
causes are shorter. The size of a cause is not known where a fact is counted."""
NODES_THAT_HALVE = 64
"""Nodes of a gang whose records count half. With 8 ranks on each node, a recovery then counts 50 KiB for any number of
nodes: its records have 51 KiB for 2 nodes, 101 KiB for 64, and 842 KiB for 1,000 (measured)."""
FORGOTTEN_BYTES = 1.0
"""Bytes below which what was counted is forgotten."""


@dataclass(slots=True)
class JournalUse:
    """Bytes that counted at a time (seconds)."""

    counted: float = 0.0
    at: float = 0.0

    def counted_at(self, now: float) -> float:
        """Bytes that count still."""
        return self.counted * exp(-max(0.0, now - self.at) / FADES_S)

    def add(self, size: float, at: float) -> None:
        """Count `size` bytes more."""
        self.counted, self.at = self.counted_at(at) + size, max(at, self.at)

    def wait_s(self, most: float, now: float) -> float:
        """Seconds from now until no more than `most` bytes count."""
        counted = self.counted_at(now)
        return FADES_S * log(counted / most) if counted > most > 0 else 0.0


@dataclass(slots=True)
class Account:
    """Who has submitted the gang, as what, and what the journal holds of it."""

    owner_uid: int
    name: str
    shown_spec: str
    """What views show of the job's spec, as JSON. The whole spec is in the fact GangRegistered."""
    registered_at: float
    spec_chars: int = 0
    """Characters of the whole spec as JSON."""
    journal_use: JournalUse = field(default_factory=JournalUse)
    """The records of the gang, without its registration."""


def counted_bytes(fact: facts.Fact, nodes: int) -> float:
    """What the record of `fact` counts for a gang whose job had so many nodes."""
    _, json = facts.encode(fact)
    size = ROW_BYTES + len(json.encode()) + len(describe(fact).encode())
    return size * NODES_THAT_HALVE / (NODES_THAT_HALVE + nodes)
