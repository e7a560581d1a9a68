"""A munged that hangs: its socket accepts, and nothing answers. No healthy node is blamed, and nothing stays stuck.

The processes use a link to a socket. A test turns the link from a real munged to a silent socket and back.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from muster.daemon.coordinator.core.state import facts
from muster.daemon.testing.scripted_agent import ScriptedAgent
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld, spec
from muster.daemon.transport.call_binding import name_of_agent
from muster.daemon.transport.channel import open_channel
from muster.daemon.transport.identity import IdentityUnavailable, MungeCredentials
from muster.daemon.transport.reachability import Probed, probe
from muster.v1 import agent_pb2, api_pb2, api_pb2_grpc

MUNGED = shutil.which("munged", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

pytestmark = pytest.mark.skipif(MUNGED is None, reason="munge is not installed here; the cluster's tests use it")


class Munged:
    """The munged of one host."""

    def __init__(self, folder: Path, working: Path) -> None:
        folder.mkdir()
        self._folder, self._working = folder, working
        self._silent: socket.socket | None = None
        self._turn(working)
        self.credentials = MungeCredentials(folder / "socket")

    def hangs(self) -> None:
        """From now on it accepts calls, and answers none."""
        self._silent = socket.socket(socket.AF_UNIX)
        self._silent.bind(str(self._folder / "silent"))
        self._silent.listen(100)
        self._turn(self._folder / "silent")

    def is_restarted(self) -> None:
        """From now on it answers. The connections of calls that wait are closed."""
        self._turn(self._working)
        if self._silent:
            self._silent.close()

    def _turn(self, target: Path) -> None:
        link = self._folder / "new"
        link.symlink_to(target)
        link.rename(self._folder / "socket")


@pytest.fixture
def working(tmp_path: Path) -> Iterator[Path]:
    """The socket of a real munged."""
    folder = tmp_path / "munge"
    folder.mkdir(mode=0o755)
    (folder / "key").write_bytes(secrets.token_bytes(64))
    (folder / "key").chmod(0o400)
    places = [f"--{what}-file={folder / what}" for what in ("key", "pid", "log", "seed")]
    assert MUNGED
    # It is ready when its first process has ended: that is how it becomes a daemon.
    command = [MUNGED, "--force", f"--socket={folder / 'socket'}", *places]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    yield folder / "socket"
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)


@pytest.fixture
def munged(tmp_path: Path, working: Path) -> Iterator[Munged]:
    made = Munged(tmp_path / "here", working)
    yield made
    made.is_restarted()


@pytest.fixture
def other_munged(tmp_path: Path, working: Path) -> Iterator[Munged]:
    made = Munged(tmp_path / "there", working)
    yield made
    made.is_restarted()


@pytest_asyncio.fixture
async def agent(other_munged: Munged) -> AsyncIterator[ScriptedAgent]:
    """An agent on another host."""
    made = ScriptedAgent("n1", spec(), other_munged.credentials)
    await made.open()
    yield made
    await made.die()


def probed(agent: ScriptedAgent) -> Probed:
    return Probed(agent.address, "n1", name_of_agent("g1", "n1"))


@pytest.mark.parametrize("deadline_s", [0.4, 0.75])
async def test_a_process_whose_own_munged_hangs_is_alive(
    agent: ScriptedAgent, munged: Munged, other_munged: Munged, deadline_s: float
) -> None:
    """Otherwise the node is taken for HUNG: it is drained, and its job loses it."""
    other_munged.hangs()
    assert await probe(probed(agent), munged.credentials, deadline_s) is None


@pytest.mark.parametrize("deadline_s", [0.4, 0.75])
async def test_a_host_whose_munged_hangs_blames_nobody(agent: ScriptedAgent, munged: Munged, deadline_s: float) -> None:
    munged.hangs()
    with pytest.raises(IdentityUnavailable, match=r"munged has not answered for .* s on .*: if it hangs, restart it"):
        await probe(probed(agent), munged.credentials, deadline_s)
    munged.is_restarted()
    assert await probe(probed(agent), munged.credentials, 5.0) is None


async def test_a_recovery_works_while_the_coordinators_munged_hangs(tmp_path: Path, munged: Munged) -> None:
    """The agent of n2 has ended: the others' streams are open, and the kernel of n2 tells."""
    world = ScriptedWorld.create(tmp_path)
    world.credentials = munged.credentials
    await world.start_coordinator()
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    for agent in world.agents.values():
        agent.unreachable["n2"] = agent_pb2.SILENCE_CLOSED
    munged.hangs()
    await world.agents["n2"].die()
    await world.wait_for_duty("RUN 2", ["n1", "n3"])
    assert [record.node for record in await world.wait_for_facts(facts.MemberRemoved)] == ["n2"]
    async with open_channel(world.address, world.credentials, identity_deadline_s=0.2) as channel:
        muster = api_pb2_grpc.MusterStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match=f"munged has not answered for 0.2 s on {os.uname().nodename}"):
            await muster.List(api_pb2.ListRequest())
    munged.is_restarted()
    async with open_channel(world.address, world.credentials) as channel:
        assert len((await api_pb2_grpc.MusterStub(channel).List(api_pb2.ListRequest())).gangs) == 1
    await world.close()
