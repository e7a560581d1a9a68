"""Faults that `muster run --local --fault` injects: what is written, and which process it hits. Pure.

    kill-node@step=30               the processes of a node are gone, as after a crash
    kill-node@step=30,node=n0       that node's
    kill-rank@step=30,rank=2        one rank is gone, its node is fine
    hang-rank@step=30,rank=2        one rank is stopped (SIGSTOP) and goes on no more
    xid-node@step=30,code=48        the kernel log of a node reports that error (default 79)
    kill-rank@time=10               10 s after the gang first ran: for scripts that don't tell their steps

Without `node` and `rank` the highest rank, and its node, are hit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from muster.v1.api_pb2 import GangView, RankView


class Kind(StrEnum):
    """What happens."""

    KILL_NODE = "kill-node"
    KILL_RANK = "kill-rank"
    HANG_RANK = "hang-rank"
    XID_NODE = "xid-node"


_OF_RANKS = frozenset({Kind.KILL_RANK, Kind.HANG_RANK})
_SETTINGS = {Kind.KILL_NODE: {"node"}, **{kind: {"rank"} for kind in _OF_RANKS}, Kind.XID_NODE: {"node", "code"}}
_FORM = "KIND@step=N or KIND@time=SECONDS, for example kill-node@step=30,node=n1 (or kill-rank, hang-rank, xid-node)"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, due at `step` finished steps, or `time` seconds after the gang first ran (-1: not given).

    `rank` -1 and `node` "": the highest rank and its node.
    """

    kind: Kind
    step: int = -1
    time: int = -1
    node: str = ""
    rank: int = -1
    code: int = 79

    def __str__(self) -> str:
        """As it was asked for, without what it hits."""
        return f"{self.kind}@step={self.step}" if self.step >= 0 else f"{self.kind}@time={self.time}"

    def is_due(self, step: int, running_s: float) -> bool:
        """After `step` finished steps, `running_s` seconds after the gang first ran."""
        return 0 <= self.step <= step or 0 <= self.time <= running_s


@dataclass(frozen=True, slots=True)
class Hit:
    """A fault that is due, and what it hits."""

    fault: Fault
    node: str
    rank: int

    @property
    def text(self) -> str:
        """For the user."""
        match self.fault.kind:
            case Kind.KILL_NODE:
                return f"killing every process of {self.node} (rank {self.rank})"
            case Kind.KILL_RANK:
                return f"killing rank {self.rank} on {self.node}"
            case Kind.HANG_RANK:
                return f"stopping rank {self.rank} on {self.node} for good"
            case Kind.XID_NODE:
                return f"the kernel log of {self.node} reports Xid {self.fault.code}"


def parse(text: str) -> Fault:
    """The fault that `text` describes.

    Raises:
        argparse.ArgumentTypeError: it describes none; says what would be right.
    """
    kind, at, rest = text.partition("@")
    pairs = [part.partition("=") for part in rest.split(",")]
    settings = {key: value for key, _, value in pairs}
    if not at or kind not in set(Kind) or len(settings) != len(pairs) or len({"step", "time"} & set(settings)) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be {_FORM}")
    if strange := set(settings) - _SETTINGS[Kind(kind)] - {"step", "time"}:
        allowed = ", ".join(sorted(_SETTINGS[Kind(kind)] | {"step", "time"}))
        raise argparse.ArgumentTypeError(f"{text!r}: {kind} knows {allowed}, not {', '.join(sorted(strange))}")
    numbers = {key: value for key, value in settings.items() if key != "node"}
    if wrong := [f"{key}={value}" for key, value in numbers.items() if not value.isdecimal()]:
        raise argparse.ArgumentTypeError(f"{text!r}: {' '.join(wrong)} must be a whole number, 0 or more")
    return Fault(Kind(kind), **{key: int(value) for key, value in numbers.items()}, node=settings.get("node", ""))


def missed(fault: Fault, step: int) -> str:
    """What to say of a fault that was not due before the gang ended after `step` finished steps."""
    hint = "; a script without the three lines declares none: give time=SECONDS" if step == 0 < fault.step else ""
    return f"{fault} did not strike: the gang ended after {step} declared steps{hint}"


def due(faults: Sequence[Fault], view: GangView, running_s: float) -> list[Hit]:
    """Those whose moment has come, while the gang runs, with what they hit now. Whoever is not there is not hit."""
    if view.phase != "RUNNING" or not view.ranks:
        return []
    hits = []
    for fault in faults:
        target = _target(fault, view.ranks)
        if fault.is_due(view.step, running_s) and target is not None:
            hits.append(Hit(fault, fault.node or target.node, target.rank))
    return hits


def _target(fault: Fault, ranks: Sequence[RankView]) -> RankView | None:
    if fault.kind in _OF_RANKS and fault.rank >= 0:
        wanted = [rank for rank in ranks if rank.rank == fault.rank]
    else:
        wanted = [rank for rank in ranks if fault.node in ("", rank.node)]
    if not wanted and fault.node:
        return RankView(rank=0, node=fault.node)  # a spare
    return max(wanted, key=lambda rank: rank.rank, default=None)


def kernel_line(code: int) -> str:
    """What NVIDIA's driver writes for Xid `code`, as a record of /dev/kmsg without its head."""
    return f"NVRM: Xid (PCI:0000:3b:00): {code}, pid='<unknown>', name=<unknown>, injected by muster run --local"
