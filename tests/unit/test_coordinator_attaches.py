"""Many node daemons attach at the same time: those that are attached are heard, and others come one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest_asyncio

from muster.daemon.coordinator.services.attach_turns import AttachTurns
from muster.daemon.coordinator.services.node_service import RETURN_S_PER_NODE
from muster.daemon.coordinator.testing.scripted_world import DEADLINE_S, ScriptedWorld
from muster.daemon.transport.channel import credential_metadata, open_channel
from muster.v1 import node_pb2, node_pb2_grpc


async def test_a_heartbeat_waits_for_one_hello_at_most() -> None:
    turns, done = AttachTurns(), []

    async def attach() -> None:
        await turns.wait()
        done.append("hello")

    attaching = [asyncio.create_task(attach()) for _ in range(100)]
    await asyncio.sleep(0)  # one turn of the loop: all of them wait now
    asyncio.get_running_loop().call_soon(done.append, "heartbeat")
    await asyncio.gather(*attaching)
    assert done.count("hello") == 100
    assert done.index("heartbeat") <= 1


async def test_who_gives_up_its_attach_takes_no_turn() -> None:
    turns = AttachTurns()
    first, given_up, last = (asyncio.create_task(turns.wait()) for _ in range(3))
    await asyncio.sleep(0)  # one turn of the loop: all of them wait now
    given_up.cancel()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(first, last)
    assert given_up.cancelled()


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ScriptedWorld]:
    made = ScriptedWorld.create(tmp_path)
    await made.start_coordinator()
    yield made
    await made.close()


async def test_the_more_nodes_are_attached_the_more_time_they_are_given_to_return(world: ScriptedWorld) -> None:
    told = []
    async with AsyncExitStack() as open_channels, asyncio.timeout(DEADLINE_S):
        for node in ("n1", "n2", "n3"):
            channel = await open_channels.enter_async_context(open_channel(world.address, world.credentials))
            first = node_pb2.NodeMessage(hello=node_pb2.NodeHello(node=node, boot_id="b", incarnation="d"))
            metadata = await credential_metadata(channel, "/muster.v1.NodeService/Attach", first)
            stub: Any = node_pb2_grpc.NodeServiceStub(channel)
            call = stub.Attach(metadata=metadata)
            await call.write(first)
            told.append((await call.read()).return_within_s)
    assert told == [RETURN_S_PER_NODE, 2 * RETURN_S_PER_NODE, 3 * RETURN_S_PER_NODE]
