"""The faults that `muster run --local --fault` injects: their syntax and their targets. Pure.

    kill-node@step=30               ends all processes of a node, as in a crash
    kill-node@step=30,node=n0       the same on node n0
    kill-rank@step=30,rank=2        kills one rank; its node is healthy
    hang-rank@step=30,rank=2        stops one rank for ever (SIGSTOP)
    xid-node@step=30,code=48        writes that Xid to a node's kernel log (default 79)
    kill-rank@time=10               10 s after the gang first ran: for scripts that do not report steps

Without `node` and `rank`, the target is the highest rank and its node.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from muster.v1.api_pb2 import GangView, RankView


class Kind(StrEnum):
    """The kinds of faults."""

    KILL_NODE = "kill-node"
    KILL_RANK = "kill-rank"
    HANG_RANK = "hang-rank"
    XID_NODE = "xid-node"


_RANK_FAULTS = frozenset({Kind.KILL_RANK, Kind.HANG_RANK})
_SETTINGS = {Kind.KILL_NODE: {"node"}, **{kind: {"rank"} for kind in _RANK_FAULTS}, Kind.XID_NODE: {"node", "code"}}
_SYNTAX = "KIND@step=N or KIND@time=SECONDS, for example kill-node@step=30,node=n1 (or kill-rank, hang-rank, xid-node)"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It is due at `step` finished steps, or `time` seconds after the gang first ran (-1: not given).

    `rank` -1 and `node` "" mean the highest rank and its node.
    """

    kind: Kind
    step: int = -1
    time: int = -1
    node: str = ""
    rank: int = -1
    code: int = 79

    def __str__(self) -> str:
        """The fault as the user wrote it, without the target."""
        return f"{self.kind}@step={self.step}" if self.step >= 0 else f"{self.kind}@time={self.time}"

    def is_due(self, step: int, running_s: float) -> bool:
        """Whether the fault is due after `step` finished steps, `running_s` seconds after the gang first ran."""
        return 0 <= self.step <= step or 0 <= self.time <= running_s


@dataclass(frozen=True, slots=True)
class DueFault:
    """A fault that is due, with its target."""

    fault: Fault
    node: str
    rank: int

    @property
    def description(self) -> str:
        """What happens, for the user."""
        match self.fault.kind:
            case Kind.KILL_NODE:
                return f"killing every process of {self.node} (rank {self.rank})"
            case Kind.KILL_RANK:
                return f"killing rank {self.rank} on {self.node}"
            case Kind.HANG_RANK:
                return f"stopping rank {self.rank} on {self.node} for ever"
            case Kind.XID_NODE:
                return f"the kernel log of {self.node} reports Xid {self.fault.code}"


def parse_fault(text: str) -> Fault:
    """Parses the value of --fault.

    Raises:
        argparse.ArgumentTypeError: `text` is not valid; the message says what is.
    """
    kind, at, rest = text.partition("@")
    pairs = [part.partition("=") for part in rest.split(",")]
    settings = {key: value for key, _, value in pairs}
    if not at or kind not in set(Kind) or len(settings) != len(pairs) or len({"step", "time"} & set(settings)) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be {_SYNTAX}")
    if unknown := set(settings) - _SETTINGS[Kind(kind)] - {"step", "time"}:
        allowed = ", ".join(sorted(_SETTINGS[Kind(kind)] | {"step", "time"}))
        raise argparse.ArgumentTypeError(f"{text!r}: {kind} accepts {allowed}, not {', '.join(sorted(unknown))}")
    numbers = {key: value for key, value in settings.items() if key != "node"}
    if wrong := [f"{key}={value}" for key, value in numbers.items() if not value.isdecimal()]:
        raise argparse.ArgumentTypeError(f"{text!r}: {' '.join(wrong)} must be a whole number, 0 or more")
    return Fault(Kind(kind), **{key: int(value) for key, value in numbers.items()}, node=settings.get("node", ""))


def describe_missed(fault: Fault, step: int) -> str:
    """The message for a fault that was not due before the gang ended, after `step` finished steps."""
    hint = "; a script that does not use Muster's library reports no steps: use time=SECONDS"
    return (
        f"{fault} was not injected: the gang ended after {step} reported steps{hint if step == 0 < fault.step else ''}"
    )


def due_faults(faults: Sequence[Fault], view: GangView, running_s: float) -> list[DueFault]:
    """The faults that are due while the gang runs, with their current targets. A fault without an existing target is
    not due.
    """
    if view.phase != "RUNNING" or not view.ranks:
        return []
    hits = []
    for fault in faults:
        target = _target(fault, view.ranks)
        if fault.is_due(view.step, running_s) and target is not None:
            hits.append(DueFault(fault, fault.node or target.node, target.rank))
    return hits


def _target(fault: Fault, ranks: Sequence[RankView]) -> RankView | None:
    if fault.kind in _RANK_FAULTS and fault.rank >= 0:
        candidates = [rank for rank in ranks if rank.rank == fault.rank]
    else:
        candidates = [rank for rank in ranks if fault.node in ("", rank.node)]
    if not candidates and fault.node:
        return RankView(rank=0, node=fault.node)  # a spare
    return max(candidates, key=lambda rank: rank.rank, default=None)


def kernel_line(code: int) -> str:
    """The line that NVIDIA's driver writes for Xid `code`, as a record of /dev/kmsg without its prefix."""
    return f"NVRM: Xid (PCI:0000:3b:00): {code}, pid='<unknown>', name=<unknown>, injected by muster run --local"
