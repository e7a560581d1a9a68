"""What a user with a credential can do with whole messages of the largest size, tried against the real servers.

A message takes up to 75 times its bytes once it is read: an empty entry of a list has two bytes on the wire.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.unit.test_known_callers import (
    ATTACH,
    BUSY,
    OWNER,
    PING,
    REGISTER,
    SOON_S,
    STRANGER,
    agent,
    attacked,
    coordinator,
    soon,
)

from muster.daemon.testing.scripted_world import spec
from muster.daemon.transport.calls.call_refused import CallRefused
from muster.daemon.transport.calls.call_share import CallShare
from muster.daemon.transport.server_limits import API_CALLS, KIB, MIB, SPEC_MESSAGE_BYTES, STRANGERS_AT_AGENT
from muster.v1 import agent_pb2 as pb
from muster.v1 import api_pb2

NOT_FOUND = grpc.StatusCode.NOT_FOUND.value[0]
INVALID, DENIED = grpc.StatusCode.INVALID_ARGUMENT.value[0], grpc.StatusCode.PERMISSION_DENIED.value[0]


def hello(**more: Any) -> pb.AgentHello:
    """Of an agent in a job that Slurm does not have."""
    return pb.AgentHello(gang_id="g1", slurm_job_id=99, node="n1", incarnation="a", peer_address="127.0.0.1:1", **more)


def registration(size: int, job: int = 99) -> bytes:
    """A registration with an environment of so many bytes."""
    one = api_pb2.RegisterRequest(gang_id="g9", slurm_job_id=job, spec=spec(env={"A": "x" * size}))
    return bytes(one.SerializeToString())


DESCRIBE = "/muster.v1.Muster/Describe"
LARGE = spec(env={"A": "x" * SPEC_MESSAGE_BYTES})


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (REGISTER, api_pb2.RegisterRequest(gang_id="g9", slurm_job_id=99, spec=LARGE)),
        (DESCRIBE, api_pb2.GangRef(job_identity="x", like=LARGE)),
        (ATTACH, pb.AgentMessage(hello=hello(spec=LARGE))),
    ],
    ids=["Register", "Describe", "Attach"],
)
async def test_a_first_message_that_is_larger_than_any_spec_is_not_parsed(
    method: str, message: Any, tmp_path: Path
) -> None:
    async with attacked(coordinator, tmp_path) as (served, connect):
        caller, whole = await connect(), message.SerializeToString()
        call = caller.call(method, served.token(STRANGER, method, whole), whole)
        assert await caller.ended([call]) == [INVALID]


async def test_an_agent_echoes_no_large_nonce_of_a_stranger(tmp_path: Path) -> None:
    """The attack: Pings whose answers are as large, 16 MiB, and are not read."""
    async with attacked(agent, tmp_path) as (served, connect):
        caller, message = await connect(), b"\x0a" + b"\x80\x80\x04" + b"x" * 64 * KIB
        assert len(message) > STRANGERS_AT_AGENT.first_message_bytes
        call = caller.call(PING, served.token(STRANGER, PING, message), message)
        assert await caller.ended([call]) == [INVALID]


async def test_the_status_of_an_agent_is_read_when_its_user_has_the_node(tmp_path: Path) -> None:
    """The attack: a user without a job sends statuses of two million empty ranks, of 300 MiB each once they are read.
    They were kept while Slurm was asked about the job."""
    first = pb.AgentMessage(hello=hello()).SerializeToString()
    status = bytes(3 * MIB)
    async with attacked(coordinator, tmp_path) as (served, connect):
        caller = await connect()
        whole = first + b"\x00" + len(status).to_bytes(4, "big") + status
        call = caller.call(ATTACH, served.token(STRANGER, ATTACH, first), whole, size=len(first))
        assert await caller.ended([call]) == [DENIED]
        assert caller.sent < MIB


@pytest.mark.parametrize("message", [registration(MIB // 2), registration(2 * MIB)], ids=["handled", "not parsed"])
async def test_nothing_of_a_refused_call_waits_for_the_garbage_collector(message: bytes, tmp_path: Path) -> None:
    """The attack: registrations that are refused. gRPC and the error of the call referred to each other, and the frames
    of the error to the message: 40 of 1 MiB took 650 MiB."""
    async with attacked(coordinator, tmp_path) as (served, connect):
        caller = await connect()
        gc.collect()
        earlier = [one for one in gc.get_objects() if isinstance(one, CallRefused)]  # of tests before this one
        gc.disable()
        try:
            call = caller.call(REGISTER, served.token(STRANGER, REGISTER, message), message)
            assert await caller.ended([call]) in ([NOT_FOUND], [INVALID])
            while any(isinstance(one, CallRefused) and one not in earlier for one in gc.get_objects()):  # noqa: ASYNC110
                await asyncio.sleep(0)  # until the task of the call has ended
        finally:
            gc.enable()


async def test_large_messages_of_one_user_wait_for_each_other(tmp_path: Path) -> None:
    """The attack: registrations that wait for a Slurm that does not answer. Each was kept as long."""

    def patient(share: CallShare) -> CallShare:
        return replace(soon(share), reading=64)

    size = MIB // 2
    most = API_CALLS.held_bytes // size
    async with attacked(coordinator, tmp_path, patient) as (served, connect):
        served.slurm.unavailable_reason = "slurmctld does not answer"
        callers, message = [await connect() for _ in range(4 * most)], registration(size)
        for caller in callers:
            caller.call(REGISTER, served.token(STRANGER, REGISTER, message), message)
        while sum(len(caller.statuses) for caller in callers) < 3 * most:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert Counter(status for caller in callers for status in caller.statuses.values()) == {BUSY: 3 * most}
        for uid, more in ((STRANGER, registration(0)), (OWNER, message)):
            other = await connect()
            call = other.call(REGISTER, served.token(uid, REGISTER, more), more)
            with pytest.raises(TimeoutError):  # it waits for Slurm
                async with asyncio.timeout(2 * SOON_S):
                    await other.ended([call])
