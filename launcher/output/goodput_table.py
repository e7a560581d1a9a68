"""The account of goodput over all jobs: as a table, as CSV, and as JSON. Pure."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from muster.launcher.output.screen import Screen
from muster.launcher.output.table import table
from muster.v1 import goodput_pb2 as pb
from muster.wording import counted

HOUR_S = 3600.0
USEFUL, STEPS_UNKNOWN, QUEUE = "useful", "steps_unknown", "queue"
_NO_KEY = {"cause": "(no fault)", "node": "(no node)", "leaf": "(no leaf)", "account": "(no account)"}
_CHARGED = ("cause", "node", "leaf")
"""Groupings by what losses are charged with: nobody's useful time is in their rows."""
_PARTS_NAMED = 3
"""The largest lost parts, which the table names."""


@dataclass(frozen=True, slots=True)
class Group:
    """One row in GPU hours. `lost`: by category, the largest first. `money`: of what was lost; 0: there is no price.
    `steps_unknown`: the part of `useful` in which ranks ran of whose scripts no step is known."""

    key: str
    allocated: float
    useful: float
    steps_unknown: float
    queue: float
    lost: dict[str, float]
    faults: int
    saved: float
    money: float

    @property
    def goodput(self) -> float | None:
        """The useful share of the allocated time; None: nothing was allocated."""
        return self.useful / self.allocated if self.allocated else None


def groups(rows: Sequence[pb.GoodputRow], price: float) -> list[Group]:
    """The rows, in their order. `price`: of one GPU hour."""
    return [_group(row, price) for row in rows]


def total(found: Sequence[Group]) -> Group:
    """All rows together."""
    lost: dict[str, float] = {}
    for one in found:
        for category, hours in one.lost.items():
            lost[category] = lost.get(category, 0.0) + hours
    return Group(
        "total",
        sum(one.allocated for one in found),
        sum(one.useful for one in found),
        sum(one.steps_unknown for one in found),
        sum(one.queue for one in found),
        _largest_first(lost),
        sum(one.faults for one in found),
        sum(one.saved for one in found),
        sum(one.money for one in found),
    )


def _group(row: pb.GoodputRow, price: float) -> Group:
    hours = {part.category: part.gpu_s / HOUR_S for part in row.parts}
    unknown, queue = hours.pop(STEPS_UNKNOWN, 0.0), hours.pop(QUEUE, 0.0)
    useful = hours.pop(USEFUL, 0.0) + unknown
    lost = _largest_first(hours)
    lost_hours = sum(lost.values())
    saved, money = row.saved_gpu_s / HOUR_S, lost_hours * price
    return Group(row.key, useful + lost_hours, useful, unknown, queue, lost, row.faults, saved, money)


def _largest_first(lost: dict[str, float]) -> dict[str, float]:
    return dict(sorted(lost.items(), key=lambda item: -item[1]))


def goodput_lines(found: Sequence[Group], by: str, price: float, screen: Screen) -> Iterator[str]:
    """A table in GPU hours, and what all rows have used together."""
    rows = [tuple(_cells(one, one.key or _NO_KEY.get(by, ""), price, by in _CHARGED)) for one in found]
    whole = total(found)
    titles = (by, "lost h", *(("money",) if price else ()), "useful h", "goodput", "faults", "where it went")
    yield from table(screen, titles, [*rows, tuple(_cells(whole, "total", price))])
    yield from screen.sentence(_summary(whole, price))


def _cells(one: Group, key: str, price: float, charged: bool = False) -> Iterator[str]:
    """`charged`: the row has only what is charged with something, unless it is that without a key."""
    only_lost = charged and bool(one.key)
    yield key
    yield _hours(sum(one.lost.values()))
    if price:
        yield f"{one.money:,.0f}"
    yield "" if only_lost else _hours(one.useful)
    yield "" if only_lost or one.goodput is None else _share(one)
    yield str(one.faults or "")
    yield ", ".join(f"{part.replace('_', ' ')} {_hours(hours)}" for part, hours in [*one.lost.items()][:_PARTS_NAMED])


def _share(one: Group) -> str:
    return "no steps" if _has_no_steps(one) else f"{one.goodput:.1%}"


def _has_no_steps(one: Group) -> bool:
    """No step is known: the scripts alone know what was trained while ranks ran."""
    return 0 < one.useful == one.steps_unknown


def _hours(hours: float) -> str:
    """With one decimal; with two digits where that would be 0, as in a short test."""
    return f"{hours:,.1f}" if hours >= 1 or not hours else f"{hours:.2g}" if hours >= 1e-4 else "<0.0001"


def _summary(whole: Group, price: float) -> str:
    """The totals in words. Hours are those of GPUs."""
    if not whole.allocated:
        return "no GPU was allocated in this time"
    if _has_no_steps(whole):
        return (
            f"no step is known of {_hours(whole.allocated)} GPU hours; ranks ran for {_hours(whole.useful)} of them. "
            "What they trained in these, their scripts alone know"
        )
    lost = whole.allocated - whole.useful
    words = f"{whole.goodput:.1%} of {_hours(whole.allocated)} GPU hours trained; {_hours(lost)} were lost"
    words += f" ({whole.money:,.0f} at {price:g} an hour)" if price else ""
    words += f", to {counted(whole.faults, 'fault')} and to what every job needs"
    if whole.steps_unknown:
        words += f". No step is known of {_hours(whole.steps_unknown)} that count as trained"
    if spare := whole.lost.get("spare", 0.0):
        words += f". Spares idled for {_hours(spare)}"
        words += f" and have saved {_hours(whole.saved)}, beside a requeue for each fault" if whole.saved else ""
    return f"{words}. Jobs waited in the queue for {_hours(whole.queue)}"


def as_csv(found: Sequence[Group], by: str) -> str:
    """A line for each group and category, in GPU hours: what a spreadsheet or a plot wants."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((by, "category", "gpu_hours"))
    for one in found:
        unknown = ((STEPS_UNKNOWN, one.steps_unknown),) if one.steps_unknown else ()
        known = one.useful - one.steps_unknown
        for category, hours in ((USEFUL, known), *unknown, (QUEUE, one.queue), *one.lost.items()):
            writer.writerow((one.key, category, f"{hours:.6f}"))
    return text.getvalue()


def as_json(found: Sequence[Group], by: str, since_s: float, until_s: float) -> str:
    """One object, in GPU hours."""
    whole = total(found)
    answer = {
        "by": by,
        "since_s": since_s,
        "until_s": until_s,
        "total": _fields(whole),
        "groups": [{"key": one.key, **_fields(one)} for one in found],
    }
    return json.dumps(answer)


def _fields(one: Group) -> dict[str, Any]:
    return {
        "allocated_gpu_hours": one.allocated,
        "useful_gpu_hours": one.useful,
        "steps_unknown_gpu_hours": one.steps_unknown,
        "goodput": one.goodput,
        "lost_gpu_hours": one.lost,
        "lost_money": one.money,
        "queue_gpu_hours": one.queue,
        "faults": one.faults,
        "saved_gpu_hours": one.saved,
    }
