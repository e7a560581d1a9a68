"""nvhcd's RunHealthCheck on a Unix socket, for NVRx (nvidia-resiliency-ext) of any release that asks nvhcd.

A job that NVRx restarts hears the verdict that Slurm's hooks hear. NVRx's client sends no credential, so every user of
the node may call. The answer is made from memory: a call starts nothing, and its arguments are ignored.
"""

from __future__ import annotations

import json
import logging
from asyncio import Event
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muster.daemon.node.own_verdict import Verdict
from muster.daemon.transport.channel import make_local_server
from muster.v1 import nvhcd_pb2 as pb
from muster.v1 import nvhcd_pb2_grpc

NAME = "nvhcd.sock"
_log = logging.getLogger(__name__)


class HealthCheckService(nvhcd_pb2_grpc.HealthCheckServiceServicer):
    """The servicer. `verdict` returns what is known of this node."""

    def __init__(self, verdict: Callable[[], Verdict]) -> None:
        self._verdict = verdict

    async def RunHealthCheck(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        """See nvhcd.proto."""
        verdict = self._verdict()
        failed = int(not verdict.fit)
        output = {"fail_count": failed, "verdict": verdict.name, "reason": verdict.reason}
        return pb.HealthCheckResponse(
            success=verdict.fit,
            exit_code=failed,
            output=json.dumps(output),
            error=f"musterd: {verdict.name}: {verdict.reason}" if failed else "",
        )


async def serve(path: Path, verdict: Callable[[], Verdict]) -> None:
    """Serve until cancelled. If the socket can't be made, log a warning: NVRx then takes the node to be healthy."""
    server = make_local_server()
    nvhcd_pb2_grpc.add_HealthCheckServiceServicer_to_server(HealthCheckService(verdict), server)
    try:
        server.add_insecure_port(f"unix:{path}")
        path.chmod(0o666)
    except (OSError, RuntimeError) as error:
        _log.warning("NVRx gets no verdict from this node: %s: %s", path, error)
        return
    await server.start()
    try:
        await Event().wait()
    finally:
        await server.stop(None)
