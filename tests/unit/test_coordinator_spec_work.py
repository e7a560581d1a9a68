"""Work on whole specs holds up nothing else, and one user's work holds up no other user's for long."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from muster.daemon.coordinator.services.job_specs import SpecWork

USER, OTHER = 1001, 1002


async def test_the_event_loop_goes_on_and_users_take_turns() -> None:
    specs, go_on, done = SpecWork(), threading.Event(), list[str]()

    async def ask(uid: int, name: str) -> None:
        done.append(await specs.do(uid, lambda: name if go_on.wait() else ""))

    asked = [asyncio.create_task(ask(*one)) for one in ((USER, "a"), (USER, "b"), (USER, "c"), (OTHER, "d"))]
    await asyncio.sleep(0)
    assert not done, "the loop runs while a thread works"
    go_on.set()
    await asyncio.gather(*asked)
    assert done == ["a", "b", "d", "c"]


async def test_the_work_of_a_caller_who_has_left_keeps_its_turn_until_it_ends() -> None:
    """The attack: calls that are given up at once, each of which leaves a thread at work."""
    specs, go_on, begun, running, most = SpecWork(), threading.Event(), threading.Event(), 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        begun.set()
        go_on.wait()
        running -= 1

    calls = [asyncio.create_task(specs.do(USER, work)) for _ in range(5)]
    await asyncio.to_thread(begun.wait)
    for call in calls:
        call.cancel()
    last = asyncio.create_task(specs.do(USER, work))
    await asyncio.sleep(0)
    assert running == 1
    go_on.set()
    await last
    assert most == 1
    for call in calls:
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_who_waits_for_the_turn_keeps_nothing() -> None:
    """The attack: 256 calls of 50 bytes each kept a registered spec of 1.5 MB while they waited."""
    specs, go_on, read = SpecWork(), threading.Event(), list[int]()

    def note(number: int) -> int:
        read.append(number)
        return number

    waiting = [asyncio.create_task(specs.do(1, go_on.wait))]
    waiting += [
        asyncio.create_task(specs.do_with(1, partial(note, number), lambda record: record > 0)) for number in (1, 2, 3)
    ]
    await asyncio.sleep(0)
    assert read == [], "the turn has come for none of them"
    go_on.set()
    assert all(await asyncio.gather(*waiting))
    assert read == [1, 2, 3]
