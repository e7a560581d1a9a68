"""Whether the replicas of a state agree: a comparison of digests that the agents have made anyway. Pure.

The commit leader compares before it commits a version, and the coordinator before it restores one that no leader has
compared. Both must come to the same result, so both use this module.

Ranks of a replica group must hold the same parameters and optimizer states, bit by bit. One flipped bit on one node
makes its ranks differ from the others. In a group of three ranks or more, a minority that differs from more than half
of the group is named; otherwise nobody is.

Only groups that have agreed before are judged, in this generation or at the version from which it started. Ranks that
differ from the first snapshot on differ for a reason of the script.

Rejected: a second pass over the data, which costs what the snapshot costs; and a collective of digests in the step, for
which ranks would wait.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_NAMED_RANKS = 64
"""The most ranks that a disagreement names, to bound the size of a status."""


class ReplicaDigest(NamedTuple):
    """What a shard holds of the state that the ranks of its replica group share. Group 0: nothing can be compared."""

    group: int = 0
    digest: int = 0


ReplicaDigests = Mapping[int, ReplicaDigest]
"""By rank."""


@dataclass(frozen=True)
class Disagreement:
    """Replicas of one group disagree.

    `ranks`: those that differ from the majority; without a majority all ranks of the group.
    `replicas`: the number of ranks in the group.
    """

    ranks: tuple[int, ...]
    majority: bool
    replicas: int


@dataclass
class ReplicaAgreement:
    """What is known of the replica groups of a generation.

    `agreed`: the groups that have agreed.
    `enabled`: False if replicas of this job differ for a reason of its own; then nothing is judged.
    """

    agreed: set[int] = field(default_factory=set)
    enabled: bool = True

    def judge(self, digests: ReplicaDigests) -> Disagreement | None:
        """Compare the digests of one version. Returns the first disagreement of a group that has agreed before."""
        groups: dict[int, dict[int, int]] = {}
        for rank, replica in sorted(digests.items()):
            if replica.group:
                groups.setdefault(replica.group, {})[rank] = replica.digest
        for group, by_rank in groups.items():
            if len(set(by_rank.values())) == 1:
                if len(by_rank) > 1:
                    self.agreed.add(group)
            elif self.enabled and group in self.agreed:
                return _disagreement(by_rank)
        return None


def _disagreement(by_rank: Mapping[int, int]) -> Disagreement:
    (digest, count), *_ = Counter(by_rank.values()).most_common(1)
    majority = 2 * count > len(by_rank)
    ranks = [rank for rank, other in by_rank.items() if not majority or other != digest]
    return Disagreement(tuple(ranks[:MAX_NAMED_RANKS]), majority, len(by_rank))
