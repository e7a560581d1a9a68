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

from muster.checkpoint.format.versions import NO_VERSION, Version

MAX_LEAD_STEPS = 1024
HISTORY_VERSIONS, MISSES_TO_LENGTHEN = 8, 3
"""So many misses among so many versions make the lead longer."""


@dataclass(frozen=True)
class CommitDecision:
    """What the leader tells the gang of a version; `next_step` is kept next, `committed` is the newest of its
    generation that is (0, 0: none)."""

    version: Version
    void: bool
    next_step: int
    committed: Version


@dataclass
class CommitTracker:
    """One generation's count.

    In all calls `now` is the newest step that some rank of the leader's own can't keep any more.
    """

    generation: int
    nodes: frozenset[str]
    committed: Version = NO_VERSION
    next_step: int = 0
    _lead: int = 1
    _past: deque[bool] = field(default_factory=lambda: deque(maxlen=HISTORY_VERSIONS))
    """Which of the last versions were missed, since the lead has been what it is."""
    _before: int = 0
    """The lead before it was made shorter; 0: that has proven right."""
    _stored: dict[Version, set[str]] = field(default_factory=dict)
    _void: Version = NO_VERSION

    def stored(self, node: str, version: Version, now: int) -> CommitDecision | None:
        """`node`'s ranks stand twice at `version`."""
        if node not in self.nodes or self._settled(version):
            return None
        have = self._stored.setdefault(version, set())
        have.add(node)
        if have != self.nodes:
            return None
        self.committed = version
        return self._verdict(version, now, void=False)

    def skipped(self, node: str, version: Version, now: int) -> CommitDecision | None:
        """A rank of `node` has no snapshot of `version`, nor of what was named before it and is not committed."""
        if node not in self.nodes or self._settled(version):
            return None
        self._void = version
        return self._verdict(version, now, void=True)

    def _settled(self, version: Version) -> bool:
        return version.generation != self.generation or version <= self.committed or version <= self._void

    def _verdict(self, version: Version, now: int, *, void: bool) -> CommitDecision:
        self._stored = {s: n for s, n in self._stored.items() if s > version}
        return CommitDecision(version, void, self._schedule(version, now, missed=void), self.committed)

    def _schedule(self, version: Version, now: int, *, missed: bool) -> int:
        # A step that was named and is not settled yet stays the next one: never are there two.
        if version.step >= self.next_step:
            self._learn(missed)
            self.next_step = max(now, version.step) + self._lead
        return self.next_step

    def _learn(self, missed: bool) -> None:
        self._past.append(missed)
        if missed and self._before:
            self._change(self._before)
        elif sum(self._past) >= MISSES_TO_LENGTHEN:
            self._change(min(2 * self._lead, MAX_LEAD_STEPS))
        elif len(self._past) == HISTORY_VERSIONS and not any(self._past):
            lead = self._lead
            self._change(lead - max(1, lead // 4) if lead > 1 else lead)
            self._before = lead if lead > 1 else 0

    def _change(self, lead: int) -> None:
        self._lead, self._before = lead, 0
        self._past.clear()
