"""The bookkeeping of the commit leader: which version is committed, and which step all ranks keep next. Pure.

The commit leader is the agent on rank 0's node. It reports each commit decision to all agents of the generation.

A version is committed when every node that carries ranks has stored it, so that each rank's shard has a replica. A
version is void when some rank has skipped it, because such a version can never be complete. A void version makes older
versions void that are not committed: a rank reports the first step that it skips after the decision that named the
next step, and has no newer snapshot. Commits only move forward, so that reports about older versions get no decision.
A version whose replicas disagree is void, too (`replica_agreement`).

All ranks must keep the same step. They finish steps and receive decisions at slightly different times, so the ranks do
not choose. Each decision names the next step to keep. This step lies far enough ahead (the lead) for the decision to
reach every rank in time. The tracker adapts the lead:

- Several misses within a few versions double the lead. A step may take a millisecond or a minute, and the decision
  travels for the same time, so only doubling finds the right lead quickly.
- A series without a miss shortens the lead by a quarter. A miss soon after that restores the longer lead.
- A single miss changes nothing: it costs one version, and a longer lead would cost several.
"""

from collections import deque
from dataclasses import dataclass, field

from muster.checkpoint.format.replica_agreement import Disagreement, ReplicaAgreement, ReplicaDigests
from muster.checkpoint.format.versions import NO_VERSION, Version

MAX_LEAD_STEPS = 1024
"""The longest lead, in steps. It bounds how much work a fault can cost."""

HISTORY_VERSIONS, MISSES_TO_LENGTHEN = 8, 3
"""This many misses within this many versions double the lead."""


@dataclass(frozen=True)
class CommitDecision:
    """What the commit leader tells all agents about one version.

    `void`: the version can never be committed; otherwise it is committed.
    `next_step`: the step that all ranks keep next.
    `committed`: the newest committed version of the generation; NO_VERSION before the first commit.
    `disagreement`: why a void version is void, if its replicas disagree.
    """

    version: Version
    void: bool
    next_step: int
    committed: Version
    disagreement: Disagreement | None = None


@dataclass
class CommitTracker:
    """The reports of one generation.

    In all calls, `passed_step` is the newest step that some rank of the leader's own node can no longer keep.
    """

    generation: int
    nodes: frozenset[str]
    agreement: ReplicaAgreement = field(default_factory=ReplicaAgreement)
    committed: Version = NO_VERSION
    next_step: int = 0
    _lead_steps: int = 1
    _recent_misses: deque[bool] = field(default_factory=lambda: deque(maxlen=HISTORY_VERSIONS))
    """For each of the last versions since the lead changed: whether a rank missed it."""
    _previous_lead_steps: int = 0
    """The lead before it was shortened; 0: the shorter lead has proved sufficient."""
    _stored: dict[Version, dict[str, ReplicaDigests]] = field(default_factory=dict)
    _void: Version = NO_VERSION

    def record_stored(
        self, node: str, version: Version, passed_step: int, replicas: ReplicaDigests
    ) -> CommitDecision | None:
        """Record that every shard of `version` on `node` has a replica; returns the decision that follows, if any.

        `replicas`: what the ranks of the node have written of the state that they share with others.
        """
        if node not in self.nodes or self._is_decided(version):
            return None
        stored = self._stored.setdefault(version, {})
        stored[node] = replicas
        if stored.keys() != self.nodes:
            return None
        disagreement = self.agreement.judge({rank: of for node in stored.values() for rank, of in node.items()})
        if disagreement is not None:
            self._void = version
        else:
            self.committed = version
        return self._decide(version, passed_step, void=disagreement is not None, disagreement=disagreement)

    def record_skipped(self, node: str, version: Version, passed_step: int) -> CommitDecision | None:
        """Record that a rank of `node` has no snapshot of `version`, nor of an older version that is not committed."""
        if node not in self.nodes or self._is_decided(version):
            return None
        self._void = version
        return self._decide(version, passed_step, void=True)

    def _is_decided(self, version: Version) -> bool:
        return version.generation != self.generation or version <= self.committed or version <= self._void

    def _decide(
        self, version: Version, passed_step: int, *, void: bool, disagreement: Disagreement | None = None
    ) -> CommitDecision:
        self._stored = {newer: nodes for newer, nodes in self._stored.items() if newer > version}
        missed = void and disagreement is None
        next_step = self._choose_next_step(version, passed_step, missed=missed)
        return CommitDecision(version, void, next_step, self.committed, disagreement)

    def _choose_next_step(self, version: Version, passed_step: int, *, missed: bool) -> int:
        # A named step stays the next step until it is decided: two named steps would need two free slots.
        if version.step >= self.next_step:
            self._adapt_lead(missed)
            self.next_step = max(passed_step, version.step) + self._lead_steps
        return self.next_step

    def _adapt_lead(self, missed: bool) -> None:
        self._recent_misses.append(missed)
        if missed and self._previous_lead_steps:
            self._set_lead(self._previous_lead_steps)
        elif sum(self._recent_misses) >= MISSES_TO_LENGTHEN:
            self._set_lead(min(2 * self._lead_steps, MAX_LEAD_STEPS))
        elif len(self._recent_misses) == HISTORY_VERSIONS and not any(self._recent_misses):
            lead = self._lead_steps
            self._set_lead(lead - max(1, lead // 4) if lead > 1 else lead)
            self._previous_lead_steps = lead if lead > 1 else 0

    def _set_lead(self, steps: int) -> None:
        self._lead_steps, self._previous_lead_steps = steps, 0
        self._recent_misses.clear()
