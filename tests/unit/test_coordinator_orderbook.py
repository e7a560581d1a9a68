"""Agents are told what is news to them, once, and who arrives is told of in batches."""

from __future__ import annotations

import pytest

from muster.daemon.coordinator.core import facts as f
from muster.daemon.coordinator.core.events import GangSpec
from muster.daemon.coordinator.core.ledger import Ledger, apply
from muster.daemon.coordinator.core.states import Phase
from muster.daemon.coordinator.orderbook import OrderBook
from muster.daemon.coordinator.streams import AgentStream, AgentStreams
from muster.v1 import agent_pb2 as pb

SEATS = (f.Seat("n1", 0, "n2", ("n2",)), f.Seat("n2", 1, "n1", ("n1",)))
JOINED = [f.MemberJoined("g", n, 7, "i", f"{n}:1", n == "n1", "") for n in ("n1", "n2")]
START = [
    f.GenerationFenced("g", 0, "start", True, "n1", 0, 1.0),
    f.GenerationStarted("g", 1, SEATS, (), "n1", 4001, None, (), "", 2.0, "start"),
]


class Desk:
    """A ledger with one gang, the streams of its agents, and the book between them."""

    def __init__(self) -> None:
        self.ledger, self.streams = Ledger(), AgentStreams()
        self.book = OrderBook(self.ledger, self.streams, 3)
        self.hold([f.GangRegistered("g", 7, 0, "", GangSpec(2, 0), "{}"), f.PhaseChanged("g", Phase.GATHERING, "")])

    def hold(self, facts: list[f.Fact]) -> None:
        """Facts come to hold, and are followed."""
        for fact in facts:
            apply(self.ledger, fact, 1.0)
        self.book.follow(facts)

    def attach(self, node: str) -> AgentStream:
        """The node's agent opens its stream."""
        stream = AgentStream("g", node, "i")
        self.streams.add(stream)
        self.book.tell(stream)
        return stream


async def _members(stream: AgentStream) -> list[str]:
    message = await stream.take()
    assert message
    assert message.term == 3
    return [member.node for member in message.order.members]


async def test_arrivals_are_told_together_and_a_start_at_once() -> None:
    desk = Desk()
    desk.hold([JOINED[0]])
    first = desk.attach("n1")
    before = first.ordered
    desk.hold([JOINED[1]])
    second = desk.attach("n2")
    assert first.ordered is before
    await first.take()
    await second.take()
    assert await _members(first) == await _members(second) == ["n1", "n2"]
    desk.hold(START)
    assert first.ordered
    assert first.ordered.order.duty == pb.DUTY_RUN
    assert first.ordered is second.ordered
    desk.book.close()


@pytest.mark.parametrize(
    "fact", [f.FirstStep("g", 1, 1), f.SlurmSettled("g", 1, ""), f.PhaseChanged("g", Phase.RUNNING, "")]
)
async def test_what_changes_no_order_is_not_told(fact: f.Fact) -> None:
    desk = Desk()
    desk.hold([*JOINED, *START])
    streams = [desk.attach(node) for node in ("n1", "n2")]
    before = [stream.ordered for stream in streams]
    desk.hold([fact])
    assert [stream.ordered for stream in streams] == before
    assert all(stream.ordered is told for stream, told in zip(streams, before, strict=True))
    desk.book.close()
