"""ProbeService of the node daemon: tells any caller with a valid credential that this process is alive."""

from __future__ import annotations

from functools import partial
from typing import Any

import grpc.aio

from muster.daemon.transport import call_binding
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.channel import make_server
from muster.daemon.transport.identity import Credentials
from muster.daemon.transport.server_limits import NODE_DAEMON, ServerLimits
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


def make_probe_server(
    credentials: Credentials,
    node: str,
    incarnation: str,
    *,
    share_port: bool = False,
    limits: ServerLimits = NODE_DAEMON,
) -> grpc.aio.Server:
    """The server of a node daemon. It listens nowhere yet. `share_port`: beside a reservation of its port."""
    refuse = partial(Rights(frozenset()).refusal, names_job=False)
    names = frozenset({call_binding.name_of_node_daemon(node)})
    server = make_server(credentials, limits, server_names=lambda: names, refuse=refuse, share_port=share_port)
    common_pb2_grpc.add_ProbeServiceServicer_to_server(ProbeService(node, incarnation), server)
    return server
