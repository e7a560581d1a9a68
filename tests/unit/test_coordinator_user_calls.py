"""One user's calls of the public API take no places of others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.core.state.durable_state import Node
from muster.daemon.coordinator.services.api_service import NODES_PER_LOOP_TURN, MusterService
from muster.daemon.coordinator.services.caller_limits import UserCalls
from muster.daemon.coordinator.services.login_names import LoginNames
from muster.daemon.coordinator.slurm.lookup import SlurmLookup
from muster.daemon.testing.chosen_users import ChosenUser
from muster.daemon.testing.scripted_world import DEADLINE_S, NODES, ScriptedWorld
from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.calls.call_refused import CallRefused
from muster.daemon.transport.channel import open_channel
from muster.daemon.transport.identity import Caller, set_call
from muster.daemon.transport.server_limits import StreamLimits, coordinator_share, more_coordinator_calls
from muster.v1 import api_pb2, api_pb2_grpc
from muster.v1.common_pb2 import JobSpec

SLURM, OWNER, OTHER = 64030, 1001, 1002
JOB = api_pb2.GangRef(slurm_job_id=1)
MOST = 3


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ScriptedWorld]:
    """A coordinator that knows a job of `OWNER`, and lets a user have `MOST` calls under way."""
    made = ScriptedWorld.create(tmp_path, owner_uid=OWNER)
    made.credentials = ChosenUser(SLURM)
    made.rights = Rights(frozenset(), own_uid=SLURM)
    made.settings["share_of"] = lambda method: replace(coordinator_share(method), user_calls=MOST)
    await made.start_coordinator()
    assert made.coordinator
    made.coordinator.engine.post(events.GangSubmitted("g1", 1, OWNER, "train", events.GangSpec(2, 1), "{}"))
    made.coordinator.engine.post(events.SlurmJobChanged("g1", 1, NODES, 0, None))
    yield made
    await made.close()


async def test_watchers_of_one_user_leave_the_places_of_others(world: ScriptedWorld) -> None:
    """The attack: a user opens watchers until the coordinator takes no call of anybody."""
    assert isinstance(world.credentials, ChosenUser)
    async with (
        open_channel(world.address, world.credentials.as_uid(OWNER)) as owners,
        open_channel(world.address, world.credentials) as operators,
    ):
        mine: Any = api_pb2_grpc.MusterStub(owners)
        others: Any = api_pb2_grpc.MusterStub(operators)
        watchers = [mine.Watch(JOB) for _ in range(MOST)]
        for watcher in watchers:
            await anext(aiter(watcher))
        for refused in (mine.Describe(JOB), anext(aiter(mine.Watch(JOB)))):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await refused
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error.value.details() == f"busy, try again: uid {OWNER} has {MOST} calls under way, the most here"
        assert (await others.Describe(JOB)).gang_id == "g1"
        for watcher in watchers:
            watcher.cancel()
        async with asyncio.timeout(DEADLINE_S):
            while not await _is_answered(mine.Describe(JOB)):
                pass


async def _is_answered(call: Any) -> bool:
    try:
        await call
    except grpc.aio.AioRpcError:
        return False
    return True


class _Context:
    """A call's context, of which a handler uses only the end."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise grpc.aio.AbortError(code.name)


async def test_roll_calls_of_one_user_are_refused_while_one_is_made_and_others_wait_for_their_turn(
    world: ScriptedWorld,
) -> None:
    """The attack: a user asks for all nodes again and again, and the event loop does little else."""
    assert world.coordinator
    engine, roster = world.coordinator.engine, world.coordinator.roster
    for number in range(2 * NODES_PER_LOOP_TURN):
        engine.core.state.nodes[f"m{number}"] = Node(f"m{number}")
    lookup = SlurmLookup(world.slurm, roster)
    service = MusterService(
        engine, lookup, roster, world.rights, StreamLimits(), site_calls=1, login_names=LoginNames()
    )

    async def nodes_as(uid: int) -> int | str:
        set_call(Caller(uid, uid, "127.0.0.1"), "/muster.v1.Muster/Nodes")
        try:
            return len((await service.Nodes(api_pb2.ListRequest(), _Context())).nodes)  # type: ignore[arg-type]
        except grpc.aio.AbortError as error:
            return str(error)

    all_nodes = 2 * NODES_PER_LOOP_TURN + len(NODES)
    found = await asyncio.gather(nodes_as(OTHER), nodes_as(OTHER), nodes_as(OWNER), nodes_as(OTHER))
    assert found == [all_nodes, "RESOURCE_EXHAUSTED", all_nodes, "RESOURCE_EXHAUSTED"]
    assert await nodes_as(OTHER) == all_nodes


async def test_the_event_loop_goes_on_while_two_specs_are_compared(world: ScriptedWorld) -> None:
    """The attack: a user has specs of a hundred thousand variables compared again and again."""
    assert world.coordinator
    engine, roster = world.coordinator.engine, world.coordinator.roster
    registered = events.GangSpec(2, 0, durable_dir="/d", resume_from="/d/step_00000007_g1_x")
    engine.post(events.GangSubmitted("g7", 7, OWNER, "train", registered, '{"name": "train"}'))
    lookup = SlurmLookup(world.slurm, roster)
    service = MusterService(engine, lookup, roster, world.rights, StreamLimits(), login_names=LoginNames())
    like = JobSpec(name="train", durable_dir="/d", env={"LR": "1"})
    order = []

    async def compare() -> None:
        set_call(Caller(OWNER, OWNER, "127.0.0.1"), "/muster.v1.Muster/Describe")
        ref = api_pb2.GangRef(job_identity="of-another", like=like)
        order.extend((await service.Describe(ref, _Context())).differs)  # type: ignore[arg-type]

    async def go_on() -> None:
        order.append("others")

    await asyncio.gather(compare(), go_on())
    assert order == ["others", "env.LR"]


def test_a_place_is_given_back_when_a_call_fails() -> None:
    calls = UserCalls(1, "calls")

    def fail() -> None:
        with calls.one(OWNER):
            with calls.one(OTHER):
                pass
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with calls.one(OWNER), pytest.raises(CallRefused), calls.one(OWNER):
        raise AssertionError


def test_who_has_jobs_may_have_more_calls_and_who_has_none_may_not() -> None:
    api, agents = "/muster.v1.Muster/Watch", "/muster.v1.AgentService/Attach"
    assert [more_coordinator_calls(method, 0, operates=False) for method in (api, agents)] == [0, 0]
    assert [more_coordinator_calls(method, 10, operates=False) for method in (api, agents)] == [40, 10]
    assert [more_coordinator_calls(method, 12_500, operates=False) for method in (api, agents)] == [3744, 12_500]
    assert more_coordinator_calls(api, 0, operates=True) == 3744
