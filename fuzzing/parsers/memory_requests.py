"""Requests on /run/muster/memory.sock, which every user of a node may send. Each gets an answer in words."""

from google.protobuf.message import Message

from muster.daemon.node.kept_memory import memory_service
from muster.v1.memory_pb2 import MemoryRequest


def check(data: bytes) -> None:
    """`data` as one packet."""
    try:
        request: Message = memory_service.parse_request(data)
    except memory_service.NotARequest as error:
        assert str(error).isascii()
        assert str(error).isprintable()
        assert len(str(error)) <= 300
        return
    assert isinstance(request, MemoryRequest)
    assert MemoryRequest.FromString(request.SerializeToString()) == request
