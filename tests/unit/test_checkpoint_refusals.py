"""Copies that a node takes from nobody: what `muster status` says of them, and when."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.test_checkpoint_service import own, replica, running_gang, until

from muster.checkpoint.store.commit import refusals
from muster.checkpoint.store.commit.refusals import SAID_AFTER_S, Refusals


def test_the_longest_refusal_is_said_once_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    refused = Refusals(lambda: now[0])
    refused.note("n1", "no memory")
    now[0] += SAID_AFTER_S - 1
    refused.note("n2", "it has expired")
    refused.note("n1", "the munge credential is refused")
    assert (refused.words(), caplog.text) == ("", "")
    now[0] += 1
    assert refused.words() == "", "n1 may be taking a large copy since"
    for _ in range(3):
        refused.note("n1", "the munge credential is refused")
    now[0] += 4
    refused.note("n2", "it has expired")
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "n1 has taken nothing for 5 s: the munge credential is refused",
        "n2 has taken nothing for 5 s: it has expired",
    ]
    assert refused.words() == "n1 has taken nothing for 9 s: the munge credential is refused"
    refused.end("n1")
    assert refused.words() == "n2 has taken nothing for 5 s: it has expired"
    refused.clear()
    assert refused.words() == ""


async def test_an_agent_says_which_node_takes_no_copies_until_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "SAID_AFTER_S", 0.0)
    async with running_gang() as gang:
        await gang.add("n0", "n1")
        places = {0: "n0", 1: "n1"}
        await gang.run(places)
        first, second = (gang.nodes[node] for node in places.values())
        second.peer_service.drops_decisions = True
        await gang.step(1, replica(1))
        await until(lambda: first.checkpoint_service.copies_wait.startswith("n1 has taken nothing for 0 s: "))
        assert first.checkpoint_service.copies_wait.endswith(": decisions are dropped")
        second.peer_service.drops_decisions = False
        await until(lambda: first.checkpoint_service.copies_wait == "")
        await gang.step(2, replica(2))
        await until(lambda: first.committed().step == second.committed().step == 2)
        await gang.lose("n1")
        assert await asyncio.to_thread(gang.ranks[0].step, 3, replica(3)(0), own(0, 3), 5.0)
        await until(lambda: first.checkpoint_service.copies_wait.startswith("n1 has taken nothing"))


async def test_what_no_node_need_take_any_more_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence comes before the tasks of its generation are cancelled: they end by themselves."""
    monkeypatch.setattr(refusals, "SAID_AFTER_S", 0.0)
    async with running_gang() as gang:
        await gang.add("n0", "n1")
        first = gang.nodes["n0"].checkpoint_service
        for lost in (False, True):
            await gang.run({0: "n0", 1: "n1"})
            gang.nodes["n1"].peer_service.drops_decisions = True
            if lost:
                await gang.nodes["n1"].server.stop(0)
                assert await asyncio.to_thread(gang.ranks[0].step, 1, replica(1)(0), own(0, 1), 5.0)
            else:
                await gang.step(1, replica(1))
            await until(lambda: first.copies_wait.startswith("n1 has taken nothing"))
            first._commit.fence(gang.generation)
            await until(lambda: first.copies_wait == "")
