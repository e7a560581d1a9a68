"""The reason that Slurm shows of a node which Muster has taken out of service: `muster: [node] Xid 79: …`.

`[node]` stands for evidence of the hardware or the host, `[user]` for the request of an operator or of a job's owner.
Administrators and their tools can tell the two apart, and Muster's reasons from those of others.
"""

from dataclasses import dataclass
from enum import StrEnum

_PREFIX = "muster: "
"""The first words of each reason. Reasons that an earlier release has written go on with their words at once."""


class DrainSource(StrEnum):
    """On whose word a node is taken out of service."""

    NODE = "node"  # a signal of its hardware, its silence, or what happens to ranks on it
    USER = "user"  # an operator, or the owner of a job


@dataclass(frozen=True, slots=True)
class DrainReason:
    """Why a node is taken out of service. `words`: one sentence without a prefix, for example "Xid 79"."""

    words: str
    source: DrainSource = DrainSource.NODE

    def __str__(self) -> str:
        return f"{_PREFIX}[{self.source}] {self.words}"


def is_same(shown: str, written: str) -> bool:
    """Slurm shows the reason that Muster has written. Slurm's reasons are one line."""
    return bool(written) and shown.split() == written.split()


def parse(text: str) -> DrainReason | None:
    """The reason of Muster in what Slurm says of a node; None: somebody else has written it."""
    if not text.startswith(_PREFIX):
        return None
    words = text.removeprefix(_PREFIX)
    for source in DrainSource:
        if words.startswith(tag := f"[{source}] "):
            return DrainReason(words.removeprefix(tag), source)
    return DrainReason(words)
