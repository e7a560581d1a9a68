"""Order dispatch: agents get each changed order once, and joins of a gathering gang in batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.events import GangSpec
from muster.daemon.coordinator.core.state.state_tables import Phase
from muster.daemon.coordinator.core.turn.state_updates import apply
from muster.daemon.coordinator.shell.agent_streams import AgentOutbox, AgentStreams
from muster.daemon.coordinator.shell.order_dispatch import OrderDispatcher
from muster.v1 import agent_pb2 as pb

SEATS = (facts.Seat("n1", 0, "n2", ("n2",)), facts.Seat("n2", 1, "n1", ("n1",)))
JOINED = [facts.MemberJoined("g", n, 7, "i", f"{n}:1", n == "n1", "") for n in ("n1", "n2")]
START = [
    facts.GenerationFenced("g", 0, "start", True, "n1", 0, 1.0),
    facts.GenerationStarted("g", 1, SEATS, (), "n1", 4001, None, (), "", 2.0, "start"),
]


class GangWithStreams:
    """A durable state with one gang, the streams of its agents, and the dispatcher between them."""

    def __init__(self) -> None:
        self.state, self.streams = DurableState(), AgentStreams()
        self.late: list[tuple[Callable[[str], None], str]] = []
        self.dispatcher = OrderDispatcher(self.state, 3, self.streams.of_gang, lambda _, *call: self.late.append(call))
        self.decide(
            [facts.GangRegistered("g", 7, 0, "", GangSpec(2, 0), "{}"), facts.PhaseChanged("g", Phase.GATHERING, "")]
        )

    def decide(self, decided: list[facts.Fact]) -> None:
        """Apply the facts and send the changed orders."""
        for fact in decided:
            apply(self.state, fact, 1.0)
        self.dispatcher.send_changes(decided)

    def attach(self, node: str) -> AgentOutbox:
        """The agent of the node opens its stream."""
        stream = AgentOutbox("g", node, "i")
        self.streams.add(stream)
        self.dispatcher.send_to(stream)
        return stream

    def run_scheduled(self) -> None:
        """Call what the dispatcher has scheduled."""
        late, self.late = self.late, []
        for action, gang in late:
            action(gang)


def _duty(stream: AgentOutbox) -> tuple[int, int, list[str]]:
    """Duty, serial and members of the newest order."""
    assert stream.last_order
    order = stream.last_order.order
    return order.duty, order.serial, [member.node for member in order.members]


def test_joins_of_a_gathering_gang_are_sent_together() -> None:
    gang = GangWithStreams()
    gang.decide([JOINED[0]])
    first = gang.attach("n1")
    assert _duty(first) == (pb.DUTY_HOLD, 0, [])  # the order from when the gang began to gather
    gang.decide([JOINED[1]])
    second = gang.attach("n2")
    assert first.last_order is second.last_order
    assert len(gang.late) == 1
    gang.run_scheduled()
    assert _duty(first) == _duty(second) == (pb.DUTY_HOLD, 2, ["n1", "n2"])
    assert first.last_order.term == 3
    gang.decide([JOINED[0]])
    assert len(gang.late) == 1


def test_a_start_is_sent_at_once_with_all_members() -> None:
    gang = GangWithStreams()
    gang.decide([JOINED[0]])
    streams = [gang.attach("n1")]
    gang.decide([JOINED[1]])
    streams.append(gang.attach("n2"))
    gang.decide(START)
    told = [stream.last_order for stream in streams]
    assert told[0] is told[1]
    assert _duty(streams[0]) == (pb.DUTY_RUN, 4, ["n1", "n2"])
    gang.run_scheduled()
    assert all(stream.last_order is before for stream, before in zip(streams, told, strict=True))


def test_an_agent_that_returns_during_a_recovery_is_sent_at_once() -> None:
    gang = GangWithStreams()
    gang.decide([*JOINED, *START, facts.GenerationFenced("g", 1, "exit", False, "n1", 0, 1.0)])
    stream = gang.attach("n1")
    gang.decide([facts.MemberJoined("g", "n2", 7, "again", "n2:2", False, "")])
    assert _duty(stream)[1] == gang.state.gangs["g"].order_serial
    assert not gang.late


def test_a_closed_dispatcher_sends_nothing() -> None:
    gang = GangWithStreams()
    gang.decide([JOINED[0]])
    first = gang.attach("n1")
    before = first.last_order
    gang.decide([JOINED[1]])
    gang.dispatcher.close()
    gang.run_scheduled()
    assert first.last_order is before


@pytest.mark.parametrize(
    "fact",
    [
        facts.FirstStep("g", 1, 1),
        facts.SlurmCallSettled("g", 1, ""),
        facts.JobChanged("g", ("n1",)),
        facts.PhaseChanged("g", Phase.RUNNING, ""),
    ],
)
def test_a_fact_that_changes_no_order_is_not_sent(fact: facts.Fact) -> None:
    gang = GangWithStreams()
    gang.decide([*JOINED, *START])
    streams = [gang.attach(node) for node in ("n1", "n2")]
    before = [stream.last_order for stream in streams]
    gang.decide([fact])
    assert all(stream.last_order is told for stream, told in zip(streams, before, strict=True))
    assert not gang.late
