"""What the records of a gang tell: its facts with their times, its newest state, its account, its recoveries. Pure.

A running coordinator sends these records, and a journal holds them. Whoever tells the story needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pydantic import ValidationError

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.generations import Recovery
from muster.daemon.coordinator.core.state.state_tables import IllegalTransition
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.goodput.intervals import Interval, Measured
from muster.daemon.coordinator.goodput.ledger import SETTLING, Ledger
from muster.daemon.coordinator.journal.history import Record
from muster.launcher.errors import WrongInput

LoggedSteps = Callable[[float, float], Measured]
"""What ranks have logged between two moments."""
_NO_SHARES: Mapping[int, Measured] = {}


@dataclass(slots=True)
class Story:
    """One gang. `until`: the end of its account (seconds since the epoch). `nodes`: all that it ever had, with their
    leaves."""

    gang: Gang
    until: float
    facts: list[tuple[float, facts.Fact]] = field(default_factory=list)
    recoveries: dict[int, Recovery] = field(default_factory=dict)
    """By the generation that each has started."""
    intervals: list[Interval] = field(default_factory=list)
    nodes: dict[str, str] = field(default_factory=dict)
    ranks: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The first and the last rank of each node in the newest generation."""

    @property
    def is_over(self) -> bool:
        """No further record follows that would change the report."""
        return self.gang.final


def nothing_logged(since: float, until: float) -> Measured:
    """No rank has noted its steps."""
    return Measured()


def told(
    records: Iterable[Record],
    until: float = 0.0,
    step: int = 0,
    logged: LoggedSteps = nothing_logged,
    shares: Mapping[int, Measured] = _NO_SHARES,
) -> Story:
    """The story of these records, which are all those of one gang.

    Args:
        until: now, if the gang goes on; else the time of the newest record is taken.
        step: the newest finished step, if it is known better than from the records.
        logged: what a script that reports no finished steps has logged.
        shares: by generation, what a coordinator has kept of what agents have measured. It counts before `logged`.

    Raises:
        WrongInput: a record can't be read, or the first one is missing.
    """
    state, ledger, began, generation = DurableState(), Ledger(), 0.0, 0
    story: Story | None = None
    for record in records:
        fact = _decoded(record)
        if not isinstance(fact, facts.NodeJudged):
            _apply(state, fact, record)
        if isinstance(fact, SETTLING):
            ledger.measure(shares.get(generation) or logged(began, record.at))
        ledger.note(fact, record.at)
        if isinstance(fact, facts.GenerationStarted):
            began, generation = record.at, fact.generation
        if story is None and isinstance(fact, facts.GangRegistered):
            story = Story(state.gangs[fact.gang], record.at)
        if story is not None:
            _note(story, fact, record.at)
    if story is None:
        raise WrongInput("the records of the job lack its registration")
    gang = story.gang
    story.until = story.until if gang.final else max(story.until, until)
    ledger.measure(shares.get(generation) or logged(began, story.until))
    reached = gang.newest.progress.step
    story.intervals = ledger.take() + ledger.unsettled(story.until, step or (reached.step if reached else 0))
    return story


def _decoded(record: Record) -> facts.Fact:
    try:
        return facts.decode(record.name, record.json)
    except KeyError:
        raise WrongInput(f"record {record.position} ({record.name}) is of a newer version of Muster") from None
    except ValidationError as error:
        raise WrongInput(f"record {record.position} ({record.name}) is damaged: {error}") from None


def _apply(state: DurableState, fact: facts.Fact, record: Record) -> None:
    try:
        apply(state, fact, record.at)
    except (KeyError, IllegalTransition) as error:
        words = f"record {record.position} ({record.name}) does not follow from those before it: {error}"
        raise WrongInput(words) from None


def _note(story: Story, fact: facts.Fact, at: float) -> None:
    gang = story.gang
    if not isinstance(fact, facts.GangForgotten | facts.NodeJudged):
        story.until = at if not gang.final or isinstance(fact, facts.GangEnded) else story.until
    story.facts.append((at, fact))
    if (last := gang.recovery.last) is not None:
        story.recoveries[last.generation] = last
    story.nodes |= {name: member.leaf for name, member in gang.roster.members.items()}
    if isinstance(fact, facts.GenerationStarted):
        each = gang.spec.ranks_per_node
        story.ranks = {seat.node: (seat.group_rank * each, (seat.group_rank + 1) * each - 1) for seat in fact.seats}
