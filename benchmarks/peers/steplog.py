"""The log that train_plain.py writes: starts and finished steps with wall-clock times. Pure, except `read`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_START = re.compile(r"^start after step (\d+) of (\d+) ranks at (\S+)$")
_RANK = re.compile(r"^rank (\d+) on (\S+) in process (\d+)$", re.M)
_STEP = re.compile(r"^step (\d+) loss \S+ (\S+) s at (\S+)$")


@dataclass(frozen=True)
class Start:
    """One start of the training. `after` is the step of the checkpoint that was loaded; 0 for none."""

    after: int
    ranks: int
    at: float


@dataclass(frozen=True)
class Step:
    """A finished optimizer step: its number, its duration in seconds, its end in wall-clock seconds."""

    number: int
    seconds: float
    at: float


@dataclass(frozen=True)
class Recovery:
    """`after_s`: seconds from the fault to the first finished step of the next start. `redone`: repeated steps."""

    after_s: float
    started_s: float
    redone: int
    ranks: int


def parse(text: str) -> list[tuple[Start, list[Step]]]:
    """All starts with their steps, in order. An incomplete line is ignored: its writer was killed."""
    found: list[tuple[Start, list[Step]]] = []
    for line in text.splitlines():
        if start := _START.match(line):
            found.append((Start(int(start[1]), int(start[2]), float(start[3])), []))
        elif (step := _STEP.match(line)) and found:
            found[-1][1].append(Step(int(step[1]), float(step[2]), float(step[3])))
    return found


def read(path: Path) -> list[tuple[Start, list[Step]]]:
    """Parses the file at `path`. Empty if there is no file."""
    return parse(path.read_text(errors="replace")) if path.exists() else []


def host_of(text: str, rank: int) -> str:
    """The host of `rank` in the newest start. `KeyError` if the rank did not report it."""
    return process_of(text, rank)[0]


def process_of(text: str, rank: int) -> tuple[str, str]:
    """The host and the process of `rank` in the newest start. `KeyError` if the rank did not report it."""
    found: dict[int, tuple[str, str]] = {int(number): (host, pid) for number, host, pid in _RANK.findall(text)}
    return found[rank]


def recovery_after(incarnations: list[tuple[Start, list[Step]]], fault: float) -> Recovery | None:
    """The first start after `fault` (wall clock) that finished a step. None if there is none."""
    before = max((s.number for _, steps in incarnations for s in steps if s.at <= fault), default=0)
    for start, steps in incarnations:
        if start.at > fault and steps:
            redone = max(0, before - start.after)
            return Recovery(steps[0].at - fault, start.at - fault, redone, start.ranks)
    return None
