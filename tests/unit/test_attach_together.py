"""Agents of one user with large specs attach at the same time: none keeps another one from it, and little is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from tests.unit.test_known_callers import ATTACH, DEADLINE_S, OWNER, SLURM, Served, attacked, coordinator

from muster.daemon.host import clock
from muster.daemon.testing.chosen_users import ChosenUser
from muster.daemon.testing.half_calls import HalfCaller
from muster.daemon.testing.scripted_world import ScriptedWorld, spec
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.calls.call_share import CallShare
from muster.daemon.transport.server_limits import KIB, MIB, coordinator_share
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm
from muster.slurm.client.parsing.sbatch_request import JobRequest
from muster.v1 import agent_pb2 as pb
from muster.v1 import common_pb2

NODES = [f"n{number}" for number in range(1, 33)]


def patient(share: CallShare) -> CallShare:
    """Calls that wait for each other do so to the end of the test."""
    return replace(share, reading_wait_s=DEADLINE_S, first_message_s=DEADLINE_S)


def hello(node: str = "n1", words: tuple[str, ...] = ("x" * 200_000,)) -> bytes:
    """The first message of the agent on `node`. The command of its job has these words."""
    one = pb.AgentHello(
        gang_id="g1", slurm_job_id=1, node=node, incarnation="a", peer_address="127.0.0.1:1",
        spec=spec(nodes=30, spares=2, command=words),
    )  # fmt: skip
    return bytes(pb.AgentMessage(hello=one).SerializeToString())


def status(size: int = 0) -> bytes:
    """The first status of an agent, with a field of so many bytes that this version does not know."""
    unknown = common_pb2.PingRequest(nonce="x" * size).SerializeToString().replace(b"\x0a", b"\xfa\x7f", 1)
    return bytes(pb.AgentMessage(status=pb.AgentStatus.FromString(unknown)).SerializeToString())


def begin(served: Served, caller: HalfCaller, first: bytes, second: bytes, less: int = 0) -> int:
    """Attach with these messages, of which the last bytes do not come. Returns the call."""
    whole = first + b"\x00" + len(second).to_bytes(4, "big") + second
    return caller.call(ATTACH, served.token(OWNER, ATTACH, first), whole[: len(whole) - less], size=len(first))


@asynccontextmanager
async def world_of_32(folder: Path) -> AsyncIterator[ScriptedWorld]:
    """Slurm runs the job of `OWNER` on all nodes. No coordinator runs yet."""
    cluster = FakeCluster(NODES, now=clock.wall, user=(OWNER, "user"))
    cluster.submit(JobRequest(nodes=len(NODES), no_kill=True))
    world = ScriptedWorld(folder / "state", ChosenUser(SLURM), FakeSlurm(cluster), Rights(frozenset(), own_uid=SLURM))
    world.settings |= {"share_of": lambda method: patient(coordinator_share(method))}
    async with asyncio.timeout(DEADLINE_S):
        try:
            yield world
        finally:
            await world.close()


@asynccontextmanager
async def attached(world: ScriptedWorld, *, together: bool) -> AsyncIterator[None]:
    """All agents have attached: the coordinator answers each."""
    assert isinstance(world.credentials, ChosenUser)
    served = Served(world.address, "127.0.0.1", world.credentials)
    callers = [await HalfCaller.open(world.address) for _ in NODES]
    try:
        calls = []
        for node, caller in zip(NODES, callers, strict=True):
            calls.append(begin(served, caller, hello(node), status()))
            if not together:
                await caller.answered(calls[-1])
        for caller, call in zip(callers, calls, strict=True):
            await caller.answered(call)
        assert [caller.statuses for caller in callers] == [{}] * len(NODES)
        yield
    finally:
        for caller in callers:
            await caller.close()


async def test_agents_whose_gang_is_not_registered_attach_together(tmp_path: Path) -> None:
    async with world_of_32(tmp_path) as world:
        await world.start_coordinator()
        async with attached(world, together=True):
            pass


async def test_agents_attach_together_to_a_restarted_coordinator(tmp_path: Path) -> None:
    """Those that waited for room kept the places in which the statuses of the others would have been read."""
    async with world_of_32(tmp_path) as world:
        await world.start_coordinator()
        async with attached(world, together=False):
            await world.stop_coordinator()
        await world.start_coordinator()
        async with attached(world, together=True):
            pass


async def test_a_status_has_room_beside_the_hello_of_its_call(tmp_path: Path) -> None:
    async with attacked(coordinator, tmp_path, patient) as (served, connect):
        caller = await connect()
        await caller.answered(begin(served, caller, hello(words=("x" * 700_000,)), status(500_000)))
        assert not caller.statuses


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 * KIB


async def test_nothing_of_a_spec_is_kept_while_a_status_is_awaited(tmp_path: Path) -> None:
    """The attack: agents of a known gang, whose specs take 8 MiB each once they are read, send half a status."""

    def parallel(share: CallShare) -> CallShare:
        return replace(patient(share), reading=64)

    async with attacked(coordinator, tmp_path, parallel) as (served, connect):
        caller = await connect()
        await caller.answered(begin(served, caller, hello(), status()))
        first, second = hello(words=("",) * (MIB // 4)), status(500_000)
        callers, before = [await connect() for _ in range(32)], resident_bytes()
        for caller in callers:
            begin(served, caller, first, second, less=1)
        while sum(caller.sent for caller in callers) < 32 * (len(first) + len(second)):  # noqa: ASYNC110
            await asyncio.sleep(0)  # there is room for the end of a status only when the coordinator reads it
        assert resident_bytes() - before < 120 * MIB
