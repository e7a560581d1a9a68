"""How the agent's checkpoint service reaches other agents."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from muster.v1.peer_pb2_grpc import PeerServiceAsyncStub


class Dial(Protocol):
    """Returns a stub for the agent on a node."""

    def __call__(self, node: str, address: str) -> "PeerServiceAsyncStub":
        """`address`: host:port."""
        ...


def host_of(address: str) -> str:
    """The host of an `address` (host:port). An IPv6 address comes without its brackets."""
    return address.rpartition(":")[0].strip("[]")
