"""Many node daemons attach at the same time: those that are attached are heard, and others come one by one."""

from __future__ import annotations

import asyncio

from muster.daemon.coordinator.services.caller_limits import AttachQueue
from muster.daemon.testing.scripted_world import DEADLINE_S


async def test_a_heartbeat_waits_for_one_hello_at_most() -> None:
    turns, done = AttachQueue(), []

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
    turns = AttachQueue()
    first, given_up, last = (asyncio.create_task(turns.wait()) for _ in range(3))
    await asyncio.sleep(0)  # one turn of the loop: all of them wait now
    given_up.cancel()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(first, last)
    assert given_up.cancelled()
