"""The agent's side of its stream, where it ends in a way of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from muster.daemon.agent.coordinator_stream import CoordinatorStream, StreamHandlers
from muster.daemon.agent.own_status import limit_stderr
from muster.daemon.testing.scripted_coordinator import ScriptedCoordinator
from muster.daemon.transport.identity import SecretCredentials
from muster.v1.agent_pb2 import AgentHello, AgentStatus, CoordinatorMessage, RankStatus


class Statuses:
    """An agent's status, whose telling fails for the first `faults` times."""

    def __init__(self, faults: int) -> None:
        self.faults = faults

    def __call__(self) -> AgentStatus:
        self.faults -= 1
        if self.faults >= 0:
            raise ZeroDivisionError("nobody has thought of it")
        return AgentStatus(fenced_generation=7)


class Suspended(ScriptedCoordinator):
    """Reads the hello of each stream and nothing more, as if its process was suspended after that."""

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[CoordinatorMessage]:
        await anext(aiter(request_iterator))
        self.attached += 1
        await self._tell()
        await asyncio.Event().wait()
        yield CoordinatorMessage()


def _attachment(
    address: str,
    credentials: SecretCredentials,
    status: Callable[[], AgentStatus] = AgentStatus,
    answer_timeout_s: float | None = None,
) -> Coroutine[Any, Any, None]:
    def nothing(*_: object) -> None:
        pass

    hello = AgentHello(gang_id="g", node="n0", incarnation="a", peer_address="127.0.0.1:1")
    handlers = StreamHandlers(
        hello=lambda: hello,
        status=status,
        met=nothing,
        attached=nothing,
        certificate_due=lambda: False,
        certificate=nothing,
        order=nothing,
        probe=nothing,
        measure=nothing,
        dismissed=nothing,
    )
    return CoordinatorStream(address, credentials, answer_timeout_s=answer_timeout_s).run(handlers)


async def test_a_status_that_can_not_be_told_costs_its_stream_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    credentials = SecretCredentials.create(tmp_path / "secret")
    coordinator = ScriptedCoordinator(credentials)
    attaching = asyncio.create_task(_attachment(await coordinator.start(), credentials, Statuses(faults=2)))
    await coordinator.until(lambda: coordinator.status("n0").fenced_generation == 7)
    told = [record.getMessage() for record in caplog.records if record.levelname == "CRITICAL"]
    bug = "ZeroDivisionError('nobody has thought of it')"
    assert told == [f"a bug of Muster: the messages to the coordinator can't be sent: {bug}"] * 2
    attaching.cancel()
    await asyncio.wait({attaching}, timeout=60)
    assert attaching.cancelled()
    await coordinator.stop()


async def test_a_coordinator_that_reads_nothing_is_left_though_a_write_waits_for_it(tmp_path: Path) -> None:
    credentials = SecretCredentials.create(tmp_path / "secret")
    coordinator = Suspended(credentials)
    address = await coordinator.start()
    larger_than_a_window = AgentStatus(failure="x" * 2**21)
    attaching = asyncio.create_task(
        _attachment(address, credentials, lambda: larger_than_a_window, answer_timeout_s=0.5)
    )
    await coordinator.until(lambda: coordinator.attached == 2)
    attaching.cancel()
    await asyncio.wait({attaching}, timeout=60)
    await coordinator.stop()


def test_a_status_of_very_many_failed_ranks_keeps_the_stderr_of_the_first() -> None:
    ranks = [RankStatus(rank=number, stderr_tail="ü" * 50) for number in range(4)]
    limit_stderr(ranks, 250)
    assert [len(rank.stderr_tail) for rank in ranks] == [50, 50, 0, 0]


@pytest.mark.parametrize("turns", range(40))
async def test_it_ends_in_whichever_turn_it_is_told_to(tmp_path: Path, turns: int) -> None:
    credentials = SecretCredentials.create(tmp_path / "secret")
    attaching = asyncio.create_task(_attachment("127.0.0.1:1", credentials))
    for _ in range(turns):
        await asyncio.sleep(0)
    attaching.cancel()
    await asyncio.wait({attaching}, timeout=60)
    assert attaching.cancelled()
