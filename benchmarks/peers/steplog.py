"""The log that train_plain.py writes: starts and finished steps with the wall clock. Pure but for `read`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_START = re.compile(r"^start after step (\d+) of (\d+) ranks at (\S+)$")
_RANK = re.compile(r"^rank (\d+) on (\S+)$", re.M)
_STEP = re.compile(r"^step (\d+) loss \S+ (\S+) s at (\S+)$")


@dataclass(frozen=True)
class Start:
    """An incarnation of the training: `after` is the step of the checkpoint that it loaded, 0 for none."""

    after: int
    ranks: int
    at: float


@dataclass(frozen=True)
class Step:
    """A finished optimizer step: its number, how long it took (seconds), when it was finished (seconds, wall clock)."""

    number: int
    seconds: float
    at: float


@dataclass(frozen=True)
class Recovery:
    """`after_s`: seconds from the fault to the first step of the next incarnation; `redone`: steps done again."""

    after_s: float
    started_s: float
    redone: int
    ranks: int


def parse(text: str) -> list[tuple[Start, list[Step]]]:
    """Every incarnation with its steps, in order. A line that is torn (its writer was killed) is left out."""
    found: list[tuple[Start, list[Step]]] = []
    for line in text.splitlines():
        if start := _START.match(line):
            found.append((Start(int(start[1]), int(start[2]), float(start[3])), []))
        elif (step := _STEP.match(line)) and found:
            found[-1][1].append(Step(int(step[1]), float(step[2]), float(step[3])))
    return found


def read(path: Path) -> list[tuple[Start, list[Step]]]:
    """`parse` of the file at `path`; nothing where there is none yet."""
    return parse(path.read_text(errors="replace")) if path.exists() else []


def host_of(text: str, rank: int) -> str:
    """Where `rank` of the newest incarnation runs; `KeyError` where it did not say."""
    hosts: dict[int, str] = {int(number): host for number, host in _RANK.findall(text)}
    return hosts[rank]


def recovery_after(incarnations: list[tuple[Start, list[Step]]], fault: float) -> Recovery | None:
    """The first incarnation that started after `fault` (wall clock) and finished a step; None while there is none."""
    before = max((s.number for _, steps in incarnations for s in steps if s.at <= fault), default=0)
    for start, steps in incarnations:
        if start.at > fault and steps:
            redone = max(0, before - start.after)
            return Recovery(steps[0].at - fault, start.at - fault, redone, start.ranks)
    return None
