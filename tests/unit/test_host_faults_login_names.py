"""The directory of the site's users does not answer: names of users are missing, and nothing else waits."""

from __future__ import annotations

import asyncio
import os
import pwd
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.daemon.coordinator.services.login_names import MOST_THREADS, LoginNames
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld
from muster.daemon.transport.channel import open_channel
from muster.v1 import api_pb2, api_pb2_grpc


class SilentDirectory:
    """Answers nothing until `answers` is set."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked: list[int] = []

    def __call__(self, uid: int) -> str:
        """Block."""
        self.asked.append(uid)
        self.answers.wait()
        return f"user{uid}"


@pytest.fixture
def directory() -> Iterator[SilentDirectory]:
    """It answers when the test ends, so that its threads end."""
    made = SilentDirectory()
    yield made
    made.answers.set()


async def test_the_name_of_this_user_is_found() -> None:
    names = LoginNames()
    assert await names(os.getuid()) == pwd.getpwuid(os.getuid()).pw_name
    assert await names(4_000_000_001) == "uid 4000000001"


async def test_a_request_is_carried_out_while_the_directory_is_silent(
    tmp_path: Path, directory: SilentDirectory
) -> None:
    """Before, the look-up ran on the event loop: one request of any user stopped everything until it ended."""
    world = ScriptedWorld.create(tmp_path)
    world.settings["login_names"] = LoginNames(directory, timeout_s=0.2)
    await world.start_coordinator()
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    async with open_channel(world.address, world.credentials) as channel:
        api: Any = api_pb2_grpc.MusterStub(channel)
        reply = await api.Cancel(api_pb2.GangRef(slurm_job_id=1))
    assert f"uid {os.getuid()}" in reply.text
    assert directory.asked == [os.getuid()]
    await world.close()


async def test_few_threads_wait_for_a_silent_directory_and_it_is_heard_again(directory: SilentDirectory) -> None:
    names = LoginNames(directory, timeout_s=0.05)
    found = await asyncio.gather(*(names(uid) for uid in (*range(100), 0)))
    assert found == [f"uid {uid}" for uid in (*range(100), 0)]
    assert len(directory.asked) == MOST_THREADS
    directory.answers.set()
    while await names(0) != "user0":
        pass
    assert await names(0) == "user0"
