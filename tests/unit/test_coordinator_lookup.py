"""What callers choose to have looked up costs Slurm little: who calls is known first, look-ups are bounded and fair."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from muster.daemon.coordinator.slurm.fair_queue import FairQueue
from muster.daemon.coordinator.slurm.lookup import MAX_CALLS, MAX_UNANSWERED, MAX_UNANSWERED_OF_USER, SlurmLookup
from muster.daemon.host import clock
from muster.daemon.testing.scripted_world import ScriptedWorld
from muster.daemon.transport.channel import credential_metadata, open_channel
from muster.daemon.transport.identity import Proof, SecretCredentials
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm
from muster.slurm.client.types import GONE, JobAnswers, Node, NodeAnswers, Unknown
from muster.v1 import node_pb2, node_pb2_grpc

ATTACH = "/muster.v1.NodeService/Attach"
ROSTER_CALLS = 2
"""Calls for all nodes that the coordinator makes by itself when it starts."""
NAMES = 200
"""Names in one attack over the wire."""


class CountingSlurm(FakeSlurm):
    """Counts the calls, and answers only while `gate` is open."""

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__(cluster)
        self.asked_nodes: list[Collection[str] | None] = []
        self.asked_jobs: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.under_way = self.most_under_way = 0

    async def nodes(self, names: Collection[str] | None = None, *, timeout_s: float = 5.0) -> NodeAnswers | Unknown:
        self.asked_nodes.append(names)
        return await super().nodes(names, timeout_s=timeout_s)

    async def jobs(self, ids: Collection[int] | None = None, *, timeout_s: float = 5.0) -> JobAnswers | Unknown:
        self.asked_jobs += ids or ()
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await self.gate.wait()
        self.under_way -= 1
        return await super().jobs(ids, timeout_s=timeout_s)


class OrdinaryUser(SecretCredentials):
    """The credentials of uid 1000."""

    def check(self, token: str) -> Proof:
        return super().check(token)._replace(uid=1000, gid=1000)


@pytest.fixture
def slurm() -> CountingSlurm:
    return CountingSlurm(FakeCluster(("n1", "n2"), now=clock.wall))


async def _attack(tmp_path: Path, names: list[str], *, as_root: bool) -> tuple[list[Any], CountingSlurm, list[str]]:
    """One hello with each of `names`. Returns the refusals, Slurm, and the names that were resolved."""
    resolved: list[str] = []

    async def resolve(name: str) -> set[str]:
        resolved.append(name)
        return {"127.0.0.1"}

    world = ScriptedWorld.create(tmp_path)
    world.slurm = slurm = CountingSlurm(world.cluster)
    if not as_root:
        world.credentials = OrdinaryUser(tmp_path / "secret")
    await world.start_coordinator(resolve=resolve)
    assert world.coordinator
    await world.coordinator.roster.refresh_if_older(3600.0)
    async with open_channel(world.address, world.credentials) as channel:
        found = await asyncio.gather(*(_refusal(channel, name) for name in names))
    await world.close()
    return found, slurm, resolved


async def _refusal(channel: grpc.aio.Channel, name: str) -> Any:
    stub: Any = node_pb2_grpc.NodeServiceStub(channel)
    hello = node_pb2.NodeMessage(hello=node_pb2.NodeHello(node=name))
    call = stub.Attach(metadata=await credential_metadata(channel, ATTACH, hello))
    try:
        await call.write(hello)
        await call.read()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass  # the call has ended already
    return await call.code()


async def test_an_ordinary_users_hello_leads_to_no_look_up(tmp_path: Path) -> None:
    names = ["--json", "n1", *(f"x{n}" for n in range(NAMES))]
    codes, slurm, resolved = await _attack(tmp_path, names, as_root=False)
    assert grpc.StatusCode.PERMISSION_DENIED in codes  # some clients report that their write found the call ended
    assert grpc.StatusCode.OK not in codes
    assert len(slurm.asked_nodes) <= ROSTER_CALLS
    assert resolved == []


async def test_names_that_slurm_lacks_cost_no_call_each_whoever_asks(tmp_path: Path) -> None:
    names = [f"x{n}" for n in range(NAMES)]
    codes, slurm, resolved = await _attack(tmp_path, names, as_root=True)
    assert grpc.StatusCode.PERMISSION_DENIED in codes  # some clients report that their write found the call ended
    assert grpc.StatusCode.OK not in codes
    assert len(slurm.asked_nodes) < 20
    assert resolved == []


@pytest.mark.parametrize("name", ["--json", "n[1-3]", "n1,n2", "n1\nn2", "../n1"])
async def test_what_is_no_name_of_a_node_is_not_looked_up(tmp_path: Path, name: str) -> None:
    codes, slurm, resolved = await _attack(tmp_path, [name], as_root=True)
    assert codes == [grpc.StatusCode.INVALID_ARGUMENT]
    assert len(slurm.asked_nodes) <= ROSTER_CALLS
    assert resolved == []


async def test_ten_thousand_unknown_names_cost_one_call(slurm: CountingSlurm) -> None:
    lookup = SlurmLookup(slurm, roster_valid_s=3600.0)
    answers = [await lookup.node(f"x{n}", 0) for n in range(10_000)]
    assert set(map(type, answers)) <= {type(GONE), Unknown}
    assert answers[0] == GONE
    assert slurm.asked_nodes == [None]


async def test_a_known_node_costs_a_call_only_for_an_answer_that_must_be_new(slurm: CountingSlurm) -> None:
    lookup = SlurmLookup(slurm)
    for _ in range(100):
        assert isinstance(await lookup.node("n1", 0), Node)
    assert slurm.asked_nodes == [None]
    assert isinstance(await lookup.node("n1", 0, since=clock.monotonic()), Node)
    assert slurm.asked_nodes == [None, ["n1"]]


async def test_a_silent_slurm_refuses_no_node(slurm: CountingSlurm) -> None:
    slurm.unavailable_reason = "slurmctld is away"
    assert await SlurmLookup(slurm).node("n1", 0) == Unknown("slurmctld is away")


async def _turns() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_one_user_has_a_limited_number_of_look_ups(slurm: CountingSlurm) -> None:
    slurm.gate.clear()
    lookup = SlurmLookup(slurm)
    asked = [asyncio.create_task(lookup.job(1000 + n, 1000)) for n in range(1000)]
    await _turns()
    assert slurm.under_way == MAX_CALLS
    refused = [task.result() for task in asked if task.done()]
    assert len(refused) == 1000 - MAX_UNANSWERED_OF_USER
    assert set(refused) == {Unknown("128 look-ups for uid 1000 are not answered yet: try again")}
    other = asyncio.create_task(lookup.job(7, 1001))
    await _turns()
    slurm.gate.set()
    assert await other == GONE
    assert slurm.asked_jobs.index(7) <= MAX_CALLS + 1  # at most one of the other user's was served first
    await asyncio.gather(*asked)
    assert slurm.most_under_way == MAX_CALLS
    assert await lookup.job(5000, 1000) == GONE  # the places are free again


async def test_all_users_together_have_a_limited_number_of_look_ups(slurm: CountingSlurm) -> None:
    slurm.gate.clear()
    lookup = SlurmLookup(slurm)
    asked = [asyncio.create_task(lookup.job(1 + n, 1000 + n // 100)) for n in range(MAX_UNANSWERED + 50)]
    await _turns()
    assert sum(task.done() for task in asked) == 50
    slurm.gate.set()
    await asyncio.gather(*asked)


async def test_a_user_who_stops_waiting_leaves_the_place_to_others() -> None:
    queue, served = FairQueue(1), list[int]()

    async def be_served(uid: int) -> None:
        async with queue.place(uid):
            served.append(uid)

    async with queue.place(1):
        waiting = [asyncio.create_task(be_served(uid)) for uid in (1, 1, 2, 3)]
        await _turns()
        waiting[2].cancel()
        await _turns()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert served == [1, 3, 1]
