"""musterd answers NVRx's node health check. The calls here are those of a plain gRPC client, as NVRx makes them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from muster.daemon.node import nvhcd_service
from muster.daemon.node.own_verdict import Verdict
from muster.v1 import nvhcd_pb2

METHOD = "/nvhcd.HealthCheckService/RunHealthCheck"
ARGUMENTS = b"\x0a\x0a--no-slurm\x0a\x07--group\x0a\x06prolog"
"""HealthCheckRequest(args=["--no-slurm", "--group", "prolog"]) of NVRx 0.7.0, as it is on the wire."""


@asynccontextmanager
async def _serving(path: Path, verdict: Verdict) -> AsyncIterator[None]:
    running = asyncio.create_task(nvhcd_service.serve(path, lambda: verdict))
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _ask(path: Path, request: bytes = ARGUMENTS) -> nvhcd_pb2.HealthCheckResponse:
    async with grpc.aio.insecure_channel(f"unix://{path}") as channel:
        call: Any = channel.unary_unary(METHOD)
        return nvhcd_pb2.HealthCheckResponse.FromString(await call(request, wait_for_ready=True, timeout=60))


@pytest.mark.parametrize("verdict", [Verdict(), Verdict("DEGRADED", "a row remap is pending")])
async def test_a_node_in_service_is_healthy(tmp_path: Path, verdict: Verdict) -> None:
    async with _serving(tmp_path / "nvhcd.sock", verdict):
        answer = await _ask(tmp_path / "nvhcd.sock")
    assert (answer.success, answer.exit_code, answer.error) == (True, 0, "")
    assert json.loads(answer.output) == {"fail_count": 0, "verdict": verdict.name, "reason": verdict.reason}


async def test_an_unfit_node_is_not_and_says_why(tmp_path: Path) -> None:
    async with _serving(tmp_path / "nvhcd.sock", Verdict("UNFIT", 'Xid 79: "GPU"')):
        answer = await _ask(tmp_path / "nvhcd.sock")
    assert (answer.success, answer.exit_code, answer.error) == (False, 1, 'musterd: UNFIT: Xid 79: "GPU"')
    assert json.loads(answer.output)["fail_count"] == 1


def test_the_answer_is_on_the_wire_what_nvrx_expects() -> None:
    """Field 1 a bool, 2 an int32, 3 and 4 strings."""
    answer = nvhcd_pb2.HealthCheckResponse(success=True, exit_code=3, output="o", error="e")
    assert answer.SerializeToString() == b"\x08\x01\x10\x03\x1a\x01o\x22\x01e"
    assert list(nvhcd_pb2.HealthCheckRequest.FromString(ARGUMENTS).args) == ["--no-slurm", "--group", "prolog"]


async def test_every_user_may_ask(tmp_path: Path) -> None:
    path = tmp_path / "nvhcd.sock"
    async with _serving(path, Verdict()):
        await _ask(path)
        assert path.stat().st_mode & 0o777 == 0o666


async def test_a_socket_that_an_earlier_daemon_has_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "nvhcd.sock"
    async with _serving(path, Verdict("UNFIT", "before")), _serving(path, Verdict()):
        assert (await _ask(path)).success


async def test_a_large_request_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nvhcd.sock"
    async with _serving(path, Verdict()):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await _ask(path, b"\x0a\xff\xff\x03" + b"x" * 65535)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_where_no_socket_can_be_made_the_daemon_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await nvhcd_service.serve(tmp_path / "missing" / "nvhcd.sock", Verdict)
    assert "NVRx gets no verdict from this node" in caplog.text
