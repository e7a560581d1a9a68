"""Faults and recoveries of a job: what failed, what was done, how long each phase took, and what it cost. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.fact_text import describe
from muster.daemon.coordinator.core.state.generations import Recovery
from muster.daemon.coordinator.goodput import intervals as account
from muster.daemon.coordinator.goodput.intervals import Category, FaultKind, Interval
from muster.launcher.report.report_data import Fault, RecoveryParts
from muster.launcher.report.story import Story
from muster.node_health import OUT_OF_SERVICE
from muster.recovery_phases import RecoveryPhase

PHASES = tuple(Category(phase) for phase in RecoveryPhase)
"""Of a recovery, in their order."""
_STANDSTILL = {*PHASES, Category.QUEUE, Category.START}
ENDS_A_PLAIN_JOB = {FaultKind.NODE, FaultKind.CRASH, FaultKind.HANG, FaultKind.CORRUPTION}
"""What ends a job that nobody watches over, or should."""
MOST_FAULTS = 500
"""Faults in a report: the newest ones."""


@dataclass(slots=True)
class _Loss:
    """What is charged with one fault."""

    parts: dict[Category, float] = field(default_factory=dict)
    """Seconds of the whole job, by category."""
    stopped: bool = False
    generation: int = 0
    seen: set[tuple[Category, float, float]] = field(default_factory=set)

    def add(self, one: Interval) -> None:
        """Several nodes lose the same seconds: they count once."""
        key = (one.category, one.since, one.until)
        if key not in self.seen and (one.nodes or one.count):
            self.seen.add(key)
            self.parts[one.category] = self.parts.get(one.category, 0.0) + (one.until - one.since) * one.share
        if one.category in (Category.RENDEZVOUS, Category.LOAD, Category.FIRST_STEP):
            self.generation = one.generation
        self.stopped |= one.category in _STANDSTILL


def losses(intervals: Iterable[Interval]) -> dict[account.Fault, _Loss]:
    """What was lost, by fault, in the order of time. Idle nodes and slow steps stop nobody."""
    found: dict[account.Fault, _Loss] = {}
    for one in sorted(intervals, key=lambda one: one.since):
        if one.fault is not None and one.category in {*_STANDSTILL, Category.STEPS_AGAIN}:
            found.setdefault(one.fault, _Loss()).add(one)
    return {fault: loss for fault, loss in found.items() if loss.stopped}


def recoveries(story: Story) -> tuple[RecoveryParts, ...]:
    """Every recovery that has started a generation."""
    found = []
    for fault, loss in losses(story.intervals).items():
        known = story.recoveries.get(loss.generation)
        if loss.generation:
            since = (known.suspected_at or known.detected_at) if known else fault.at
            parts = dict(loss.parts) | (_until_start(known) if known else {})
            named = tuple((phase.value, parts[phase]) for phase in PHASES if parts.get(phase, 0.0) > 0)
            found.append(RecoveryParts(loss.generation, since, known.action if known else "requeue", named))
    return tuple(found)


def _until_start(known: Recovery) -> dict[Category, float]:
    """The phases that `muster status` shows, from the same times. The account alone tells what the first step took."""
    spent = {Category(phase): seconds for phase, seconds in known.phase_seconds()}
    return {phase: spent[phase] for phase in PHASES[:3]} if known.started_at else {}


def faults(story: Story) -> tuple[Fault, ...]:
    """Whatever has interrupted the job, and what was noted without an interruption, in the order of time."""
    interrupting = list(_interruptions(story))
    left = {node for fault in interrupting for node in fault.nodes}
    found = sorted([*interrupting, *_findings(story, left)], key=lambda fault: fault.at_s)[-MOST_FAULTS:]
    return tuple(replace(fault, number=number) for number, fault in enumerate(found, 1))


def _interruptions(story: Story) -> Iterator[Fault]:
    for fault, loss in losses(story.intervals).items():
        known = story.recoveries.get(loss.generation)
        requeued = Category.QUEUE in loss.parts
        action = "requeue" if requeued else "" if story.is_over else "recovers"
        if known and loss.generation:
            action = known.action
        again = max(0, known.step_before - known.step_restored) if known and known.started_at else 0
        yield Fault(
            number=0,
            at_s=(known.suspected_at if known else 0.0) or fault.at,
            generation=loss.generation,
            cause=fault.words,
            action=action or "the job ended",
            nodes=tuple(known.nodes_out if known else ()) or ((fault.node,) if fault.node else ()),
            nodes_out=tuple(known.nodes_out) if known else (),
            nodes_in=tuple(known.nodes_in) if known else (),
            lost_s=sum(seconds for category, seconds in loss.parts.items() if category in _STANDSTILL),
            steps_again=again,
            steps_again_s=loss.parts.get(Category.STEPS_AGAIN, 0.0),
        )


def _findings(story: Story, left: set[str]) -> Iterator[Fault]:
    """What was noted, and has stopped nobody: `left` are the nodes that interruptions name."""
    seen = set[object]()
    for at, fact in story.facts:
        match fact:
            case facts.StragglerDetected():
                key: object = (fact.generation, fact.rank)
            case facts.NotFiniteReported() | facts.CorruptCopyFound() | facts.ReplicasDisagreed():
                key = (type(fact), fact.node)
            case facts.LossNoted():
                key = (fact.kind, fact.step)
            case facts.NodeJudged() if (
                fact.node not in left and fact.node in story.nodes and (fact.health in OUT_OF_SERVICE or fact.signal)
            ):
                key = (fact.node, fact.health)
            case _:
                continue
        if key not in seen:
            seen.add(key)
            yield Fault(0, at, 0, describe(fact), "noted", (fact.node,) if fact.node else ())
