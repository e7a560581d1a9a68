"""What one caller with a valid credential can cost through its stream: memory, time of others, lines of the log."""

from __future__ import annotations

from muster.daemon.coordinator.shell.agent_streams import MAX_WAITING_PROBES, AgentStream
from muster.v1 import agent_pb2 as pb


async def _outbox(stream: AgentStream) -> list[pb.CoordinatorMessage]:
    """All messages that wait. Closes the stream."""
    stream.close()
    found = []
    while (message := await stream.next_message()) is not None:
        found.append(message)
    return found


async def test_what_waits_for_an_agent_that_does_not_read_is_bounded() -> None:
    """The attack: an agent pings without reading the answers."""
    stream = AgentStream("g1", "n1", "a")
    for number in range(1000):
        stream.put(pb.CoordinatorMessage(pong=pb.AgentPing(seq=number)))
        stream.put(pb.CoordinatorMessage(order=pb.Order(serial=number)))
        stream.put(pb.CoordinatorMessage(probe=pb.ProbeOrder(node="n2", probe_id=number)))
    order, probe, pong = await _outbox(stream)
    assert (order.order.serial, probe.probe.probe_id, pong.pong.seq) == (999, 999, 999)


async def test_probes_of_many_nodes_do_not_fill_an_outbox() -> None:
    stream = AgentStream("g1", "n1", "a")
    for number in range(1000):
        stream.put(pb.CoordinatorMessage(probe=pb.ProbeOrder(node=f"n{number}", probe_id=number)))
    found = [message.probe.probe_id for message in await _outbox(stream)]
    assert found == list(range(1000 - MAX_WAITING_PROBES, 1000))
