"""Messages of agents, node daemons and users, after gRPC has received them.

A message becomes an event of the core, or is refused as InvalidMessage. Everything in an event is cut to its limit: the
journal keeps it. The first byte of an input selects the message.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from google.protobuf.message import DecodeError, Message
from pydantic import TypeAdapter

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.services import conversion, job_specs
from muster.daemon.coordinator.services.hello import check_hello
from muster.daemon.transport import job_limits
from muster.fabric.sources.node_reports import NodeReport
from muster.v1 import agent_pb2, api_pb2, common_pb2, node_pb2, rank_pb2

_STORED: dict[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (events.AgentStatus, events.GangSubmitted, NodeReport)
}


def _status(data: bytes) -> events.AgentStatus:
    return conversion.status(agent_pb2.AgentStatus.FromString(data), ("n1", "n2"))


def _spec(data: bytes) -> events.GangSubmitted:
    return job_specs.gang_submitted("gang", 1, 1000, common_pb2.JobSpec.FromString(data))


def _hello(data: bytes) -> None:
    check_hello(agent_pb2.AgentHello.FromString(data))


def _node_hello(data: bytes) -> None:
    check_hello(node_pb2.NodeHello.FromString(data))


def _hardware(data: bytes) -> NodeReport:
    return conversion.node_report(common_pb2.Hardware.FromString(data))


def _only_read(kind: type[Message]) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        message = kind.FromString(data)
        assert kind.FromString(message.SerializeToString(deterministic=True)).ByteSize() == message.ByteSize()

    return read


_READERS: tuple[Callable[[bytes], Any], ...] = (
    _status,
    _spec,
    _hello,
    _node_hello,
    *map(
        _only_read,
        (
            agent_pb2.AgentMessage,
            agent_pb2.CoordinatorMessage,
            node_pb2.NodeMessage,
            node_pb2.NodeOrder,
            api_pb2.RegisterRequest,
            api_pb2.EventsRequest,
            rank_pb2.RankMessage,
            rank_pb2.AgentRankMessage,
        ),
    ),
    _hardware,
)


def check(data: bytes) -> None:
    """The first byte of `data` selects the message, the rest is the message."""
    try:
        event = _READERS[data[0] % len(_READERS) if data else 0](data[1:])
    except (DecodeError, conversion.InvalidMessage) as error:
        assert len(str(error)) <= 1_000
        return
    if event is None:
        return
    limit = job_limits.MAX_SPEC_CHARS if isinstance(event, events.GangSubmitted) else job_limits.MAX_TEXT_CHARS + 3
    assert all(len(text) <= limit for text in _texts(event))
    adapter = _STORED[type(event)]
    stored = adapter.dump_json(event, by_alias=True)
    assert len(stored) <= 5_000 + 60 * len(data)
    assert adapter.validate_json(stored) == event


def _texts(value: object) -> Iterator[str]:
    """All strings in an event."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for item in value.items() for text in _texts(item))
    elif isinstance(value, tuple):
        yield from (text for item in value for text in _texts(item))
    elif is_dataclass(value):
        yield from (text for field in fields(value) for text in _texts(getattr(value, field.name)))
