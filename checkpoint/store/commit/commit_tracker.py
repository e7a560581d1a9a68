"""When a version is committed, and which step is kept next: pure bookkeeping of a generation's leader (rank 0's agent).

A version is committed when every node that carries ranks has stored it: each of its ranks' shards stands twice. A
version that some rank skipped can never be whole: it is void, and with it what is older and not committed. For a rank
reports the first step that it skips since the one that all keep was named: it has nothing newer than that. Commits only
move forward; what is older needs no answer.

All ranks must keep the same step, and they finish steps and hear of commits at slightly different moments. So they
don't choose: with each verdict the leader names the step that is kept next, far enough ahead for everyone to hear of it
in time. How far is learned: some misses among a few versions double it, a calm while takes a quarter off, and a miss
soon after that takes it back. A single miss changes nothing: it costs one version, a longer lead would cost several.
Doubling, because a step may take a millisecond or a minute: a notice takes the same time.
"""

from collections import deque
from dataclasses import dataclass, field

from muster.checkpoint.format.versions import NOTHING, Stamp

LEAD_MOST = 1024
PAST, MISSES = 8, 3
"""So many misses among so many versions make the lead longer."""


@dataclass(frozen=True)
class Verdict:
    """What the leader tells the gang of a version; `next_step` is kept next, `committed` is the newest of its
    generation that is (0, 0: none)."""

    stamp: Stamp
    void: bool
    next_step: int
    committed: Stamp


@dataclass
class Ballot:
    """One generation's count.

    In all calls `now` is the newest step that some rank of the leader's own can't keep any more.
    """

    generation: int
    nodes: frozenset[str]
    committed: Stamp = NOTHING
    next_step: int = 0
    _lead: int = 1
    _past: deque[bool] = field(default_factory=lambda: deque(maxlen=PAST))
    """Which of the last versions were missed, since the lead has been what it is."""
    _before: int = 0
    """The lead before it was made shorter; 0: that has proven right."""
    _stored: dict[Stamp, set[str]] = field(default_factory=dict)
    _void: Stamp = NOTHING

    def stored(self, node: str, stamp: Stamp, now: int) -> Verdict | None:
        """`node`'s ranks stand twice at `stamp`."""
        if node not in self.nodes or self._settled(stamp):
            return None
        have = self._stored.setdefault(stamp, set())
        have.add(node)
        if have != self.nodes:
            return None
        self.committed = stamp
        return self._verdict(stamp, now, void=False)

    def skipped(self, node: str, stamp: Stamp, now: int) -> Verdict | None:
        """A rank of `node` has no snapshot of `stamp`, nor of what was named before it and is not committed."""
        if node not in self.nodes or self._settled(stamp):
            return None
        self._void = stamp
        return self._verdict(stamp, now, void=True)

    def _settled(self, stamp: Stamp) -> bool:
        return stamp.generation != self.generation or stamp <= self.committed or stamp <= self._void

    def _verdict(self, stamp: Stamp, now: int, *, void: bool) -> Verdict:
        self._stored = {s: n for s, n in self._stored.items() if s > stamp}
        return Verdict(stamp, void, self._schedule(stamp, now, missed=void), self.committed)

    def _schedule(self, stamp: Stamp, now: int, *, missed: bool) -> int:
        # A step that was named and is not settled yet stays the next one: never are there two.
        if stamp.step >= self.next_step:
            self._learn(missed)
            self.next_step = max(now, stamp.step) + self._lead
        return self.next_step

    def _learn(self, missed: bool) -> None:
        self._past.append(missed)
        if missed and self._before:
            self._change(self._before)
        elif sum(self._past) >= MISSES:
            self._change(min(2 * self._lead, LEAD_MOST))
        elif len(self._past) == PAST and not any(self._past):
            lead = self._lead
            self._change(lead - max(1, lead // 4) if lead > 1 else lead)
            self._before = lead if lead > 1 else 0

    def _change(self, lead: int) -> None:
        self._lead, self._before = lead, 0
        self._past.clear()
