"""ProbeService of the node daemon: tells any caller with a valid credential that this process is alive."""

from __future__ import annotations

from typing import Any

from muster.v1 import common_pb2, common_pb2_grpc

ROLE = "musterd"


class ProbeService(common_pb2_grpc.ProbeServiceServicer):
    """The servicer."""

    def __init__(self, node: str, incarnation: str) -> None:
        self._node = node
        self._incarnation = incarnation

    async def Ping(self, request: common_pb2.PingRequest, context: Any) -> common_pb2.PingReply:
        """See common.proto."""
        return common_pb2.PingReply(nonce=request.nonce, node=self._node, role=ROLE, incarnation=self._incarnation)
