"""Agents are told what is news to them, once, and who arrives is told of in batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState, apply
from muster.daemon.coordinator.core.state.events import GangSpec
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.shell.agent_streams import AgentStream, AgentStreams
from muster.daemon.coordinator.shell.order_dispatch import OrderBook
from muster.v1 import agent_pb2 as pb

SEATS = (facts.Seat("n1", 0, "n2", ("n2",)), facts.Seat("n2", 1, "n1", ("n1",)))
JOINED = [facts.MemberJoined("g", n, 7, "i", f"{n}:1", n == "n1", "") for n in ("n1", "n2")]
START = [
    facts.GenerationFenced("g", 0, "start", True, "n1", 0, 1.0),
    facts.GenerationStarted("g", 1, SEATS, (), "n1", 4001, None, (), "", 2.0, "start"),
]


class Desk:
    """A durable state with one gang, the streams of its agents, and the book between them."""

    def __init__(self) -> None:
        self.state, self.streams = DurableState(), AgentStreams()
        self.late: list[tuple[Callable[[str], None], str]] = []
        self.book = OrderBook(self.state, 3, self.streams.of, lambda _, *call: self.late.append(call))
        self.hold(
            [facts.GangRegistered("g", 7, 0, "", GangSpec(2, 0), "{}"), facts.PhaseChanged("g", Phase.GATHERING, "")]
        )

    def hold(self, facts: list[facts.Fact]) -> None:
        """Facts come to hold, and are followed."""
        for fact in facts:
            apply(self.state, fact, 1.0)
        self.book.follow(facts)

    def attach(self, node: str) -> AgentStream:
        """The node's agent opens its stream."""
        stream = AgentStream("g", node, "i")
        self.streams.add(stream)
        self.book.tell(stream)
        return stream

    def wait(self) -> None:
        """What was put off is due."""
        late, self.late = self.late, []
        for action, gang in late:
            action(gang)


def _duty(stream: AgentStream) -> tuple[int, int, list[str]]:
    """Duty, serial and members of the newest order."""
    assert stream.ordered
    order = stream.ordered.order
    return order.duty, order.serial, [member.node for member in order.members]


def test_arrivals_are_told_together() -> None:
    desk = Desk()
    desk.hold([JOINED[0]])
    first = desk.attach("n1")
    assert _duty(first) == (pb.DUTY_HOLD, 0, [])  # as it stood when the gang began to gather
    desk.hold([JOINED[1]])
    second = desk.attach("n2")
    assert first.ordered is second.ordered
    assert len(desk.late) == 1
    desk.wait()
    assert _duty(first) == _duty(second) == (pb.DUTY_HOLD, 2, ["n1", "n2"])
    assert first.ordered.term == 3
    desk.hold([JOINED[0]])
    assert len(desk.late) == 1


def test_a_start_is_told_at_once_with_all_who_have_arrived() -> None:
    desk = Desk()
    desk.hold([JOINED[0]])
    streams = [desk.attach("n1")]
    desk.hold([JOINED[1]])
    streams.append(desk.attach("n2"))
    desk.hold(START)
    told = [stream.ordered for stream in streams]
    assert told[0] is told[1]
    assert _duty(streams[0]) == (pb.DUTY_RUN, 4, ["n1", "n2"])
    desk.wait()
    assert all(stream.ordered is before for stream, before in zip(streams, told, strict=True))


def test_who_comes_back_during_a_recovery_is_told_of_at_once() -> None:
    desk = Desk()
    desk.hold([*JOINED, *START, facts.GenerationFenced("g", 1, "exit", False, "n1", 0, 1.0)])
    stream = desk.attach("n1")
    desk.hold([facts.MemberJoined("g", "n2", 7, "again", "n2:2", False, "")])
    assert _duty(stream)[1] == desk.state.gangs["g"].serial
    assert not desk.late


def test_a_book_that_is_closed_tells_nobody() -> None:
    desk = Desk()
    desk.hold([JOINED[0]])
    first = desk.attach("n1")
    before = first.ordered
    desk.hold([JOINED[1]])
    desk.book.close()
    desk.wait()
    assert first.ordered is before


@pytest.mark.parametrize(
    "fact",
    [
        facts.FirstStep("g", 1, 1),
        facts.SlurmSettled("g", 1, ""),
        facts.JobChanged("g", ("n1",)),
        facts.PhaseChanged("g", Phase.RUNNING, ""),
    ],
)
def test_what_changes_no_order_is_not_told(fact: facts.Fact) -> None:
    desk = Desk()
    desk.hold([*JOINED, *START])
    streams = [desk.attach(node) for node in ("n1", "n2")]
    before = [stream.ordered for stream in streams]
    desk.hold([fact])
    assert all(stream.ordered is told for stream, told in zip(streams, before, strict=True))
    assert not desk.late
