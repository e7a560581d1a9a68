"""What an agent answers to the others' pings, and what it tells the coordinator of that."""

from typing import Any

from muster.daemon.agent.failure_detector.peers import AgentIdentity, PeerService
from muster.v1.agent_pb2 import Order
from muster.v1.common_pb2 import Member
from muster.v1.peer_pb2 import LinkPing


def pinged(service: PeerService, node: str, generation: int = 1) -> bool:
    """Whether the pong says that `node` is out."""
    return service.pong(LinkPing(gang_id="g", node=node, generation=generation, seq=1)).outcast


def test_who_was_answered_as_a_member_is_told_of_once_it_is_out() -> None:
    order = Order(generation=1, members=[Member(node="n1"), Member(node="n2")])
    keeper: Any = None
    service = PeerService(AgentIdentity("g", "n1", "a", 0), keeper, lambda: order)
    assert not pinged(service, "n2")
    assert not pinged(service, "n3", generation=2)  # our order may be older than its own
    assert service.answered_ms().keys() == {"n3"}
    order.ClearField("members")
    order.members.add(node="n1")
    assert service.answered_ms().keys() == {"n2", "n3"}
    assert pinged(service, "n2")
    assert 0 <= service.answered_ms()["n2"] < 5000
