"""To what the time of one generation went: starting, steps that had been done before, and new ones. Pure.

Steps are taken to be equally long within a generation. So the time of a step that was done before is known without a
clock in the training script, and is part of the allocated time in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from muster.daemon.coordinator.goodput.intervals import Category, Fault, Interval, Measured


@dataclass(frozen=True, slots=True)
class Debt:
    """The steps after `after` up to `last` were finished once and are lost. `fault`: why they are done again."""

    after: int
    last: int
    fault: Fault | None


@dataclass(frozen=True, slots=True)
class Slice:
    """Time in which nothing changed. `stage`: its category, unless more is known at the end.

    `carrying`: nodes with ranks. `spares`: nodes that wait. `left`: nodes that the gang has left, for a fault, and that
    Slurm still holds for the job. `asked`: how many nodes the job waits for, in the queue.
    """

    stage: Category
    since: float
    until: float
    carrying: frozenset[str]
    spares: frozenset[str] = frozenset()
    left: tuple[tuple[str, Fault | None], ...] = ()
    asked: int = 0

    def is_like(
        self,
        stage: Category,
        carrying: frozenset[str],
        spares: frozenset[str],
        left: tuple[tuple[str, Fault | None], ...],
    ) -> bool:
        """Nothing has changed since: the sets are the very same ones."""
        same = self.carrying is carrying and self.spares is spares and self.left is left
        return self.stage is stage and same


@dataclass(slots=True)
class Running:
    """A generation that runs. `fault`: what made it necessary; None: it is the first one.

    `restored`: the step of the state that its ranks load; None: Muster gives them none. `debts`: the steps that are to
    be done again, in their order, as they were before it started. `reached`: the newest step of the generation before.
    `loads`: its ranks still load a state. `straggler`: the rank that the others wait for.
    """

    generation: int
    fault: Fault | None
    restored: int | None
    debts: tuple[Debt, ...]
    reached: int
    first_step: int = 0
    first_step_at: float | None = None
    loads: bool = False
    straggler: Fault | None = None
    measured: Measured = field(default_factory=Measured)

    def debts_now(self) -> tuple[Debt, ...]:
        """The steps that are done again once the state is loaded."""
        origin = self.restored or 0
        if self.first_step_at is not None:
            before = max(0, self.first_step - 1)
            origin = before if self.restored is None else min(self.restored, before)
        own = (Debt(origin, self.reached, self.fault),) if origin < self.reached else ()
        return (*own, *after(self.debts, max(origin, self.reached)))


def after(debts: Sequence[Debt], step: int) -> tuple[Debt, ...]:
    """What is left of `debts` once `step` is finished."""
    return tuple(replace(debt, after=max(debt.after, step)) for debt in debts if debt.last > step)


def split(slices: Sequence[Slice], moment: float, later: Category) -> list[Slice]:
    """The slices, cut at `moment`. What comes later has the category `later`."""
    found = []
    for one in slices:
        if one.since < moment:
            found.append(replace(one, until=min(one.until, moment)))
        if one.until > moment:
            found.append(replace(one, since=max(one.since, moment), stage=later))
    return found


def from_first_number(slices: Sequence[Slice], run: Running) -> list[Slice]:
    """The slices of a generation whose ranks report no finished steps: it trains from its first number on. That is
    noted in `run`."""
    found = []
    for one in slices:
        waits = one.stage in (Category.LOAD, Category.FIRST_STEP)
        found += split((one,), run.measured.first_at, Category.USEFUL) if waits else [one]
    run.first_step_at = next((one.since for one in found if one.stage is Category.USEFUL), None)
    run.first_step = run.measured.first_step if run.first_step_at is not None else 0
    return found


def labelled(slices: Sequence[Slice], generation: int, fault: Fault | None) -> Iterator[Interval]:
    """The slices under the categories that they have, charged with `fault`. Idle nodes are told apart."""
    for one in slices:
        if one.carrying or one.asked:
            yield Interval(one.stage, generation, one.since, one.until, one.carrying, fault, count=one.asked)
        yield from _idle(one, generation)


def trained(slices: Sequence[Slice], run: Running, reached: int, *, stepless: bool) -> Iterator[Interval]:
    """The slices of a generation that has come to the step `reached`. `stepless`: its script has said no step, in this
    generation or before."""
    for one in slices:
        if one.stage is Category.USEFUL:
            yield from _steps(one, run, _times_of_debts(slices, run, reached))
        elif one.stage is Category.FIRST_STEP and stepless:
            yield from labelled((replace(one, stage=Category.STEPS_UNKNOWN),), run.generation, None)
        else:
            yield from labelled((one,), run.generation, run.fault)


def _times_of_debts(slices: Sequence[Slice], run: Running, reached: int) -> list[tuple[float, float, Fault | None]]:
    """When the steps were done that had been done before, and with what their loss is charged."""
    begins, ends = run.first_step_at or 0.0, slices[-1].until
    debts, steps = after(run.debts_now(), run.first_step), reached - run.first_step
    if steps <= 0:  # it was ended before the second step, which may be one of them
        return [(begins, ends, debt.fault) for debt in debts[:1]]
    step_s = (ends - begins) / steps
    return [
        (begins + (debt.after - run.first_step) * step_s, begins + (debt.last - run.first_step) * step_s, debt.fault)
        for debt in debts
    ]


def _steps(one: Slice, run: Running, again: Sequence[tuple[float, float, Fault | None]]) -> Iterator[Interval]:
    """What a slice of training consists of. The steps that are done again are as slow as all others."""
    whole = Interval(Category.USEFUL, run.generation, one.since, one.until, one.carrying)
    for category, share in run.measured.shares():
        fault = run.straggler if category is Category.STRAGGLER else None
        yield replace(whole, category=category, share=share, fault=fault)
        whole = replace(whole, share=whole.share - share)
    moment = one.since
    for begins, ends, fault in again:
        since, until = max(begins, moment), min(ends, one.until)
        if since >= until:
            continue
        if moment < since:
            yield replace(whole, since=moment, until=since)
        yield replace(whole, category=Category.STEPS_AGAIN, since=since, until=until, fault=fault)
        moment = until
    if moment < one.until:
        yield replace(whole, since=moment)
    yield from _idle(one, run.generation)


def _idle(one: Slice, generation: int) -> Iterator[Interval]:
    """The nodes without ranks. Those that were left are charged with what made the gang leave them."""
    if one.spares:
        yield Interval(Category.SPARE, generation, one.since, one.until, one.spares)
    for node, fault in one.left:
        yield Interval(Category.SPARE, generation, one.since, one.until, frozenset((node,)), fault)
