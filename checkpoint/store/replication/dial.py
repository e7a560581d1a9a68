"""How the agent's checkpoint service reaches other agents."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from muster.v1.peer_pb2_grpc import PeerServiceAsyncStub


class Dial(Protocol):
    """Returns a stub for the agent on a node."""

    def __call__(self, node: str, address: str, *, plain: bool = False) -> "PeerServiceAsyncStub":
        """`address`: host:port. `plain`: in plain text, to a port that the agent itself has named over TLS."""
        ...


def at_port(address: str, port: int) -> str:
    """The same host as in `address` (host:port), at another port."""
    return f"{address.rpartition(':')[0]}:{port}"
