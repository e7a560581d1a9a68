"""A command and a coordinator of different versions: reading works and is commented, a change is refused in words."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from muster.compatibility import PROTOCOL, RELEASE_KEY, Side, read_metadata
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.services.api_handlers import READING
from muster.daemon.testing.scripted_world import ScriptedWorld
from muster.daemon.transport.channel import bind, make_server, open_channel
from muster.daemon.transport.server_limits import COORDINATOR
from muster.daemon.transport.site_config import Site
from muster.launcher.coordinator_client import CoordinatorClient, gang_ref
from muster.launcher.errors import SiteFault
from muster.launcher.main import parser
from muster.launcher.submission.registration import Registration
from muster.launcher.version_check import VersionCheck
from muster.v1 import api_pb2, api_pb2_grpc, diagnosis_pb2, goodput_pb2

NEXT = ("0.2.0", PROTOCOL + 1, PROTOCOL)
FAR = ("9.0.0", PROTOCOL + 9, PROTOCOL + 1)
COORDINATOR_IS_NEWER = (
    f"the muster command (muster 0.1.0) speaks protocol {PROTOCOL}, and the coordinator (muster 9.0.0) protocols "
    f"{PROTOCOL + 1} to {PROTOCOL + 9}"
)
COMMAND_IS_NEWER = (
    f"the coordinator (muster 0.1.0) speaks protocol {PROTOCOL}, and the muster command (muster 9.0.0) protocols"
)
SILENT_IS_OLDER = (
    "the coordinator (muster 0.1.0 or older) speaks protocol 1, and the muster command (muster 9.0.0) protocols"
)


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[ScriptedWorld]:
    """A coordinator with one gang of this user."""
    made = ScriptedWorld.create(tmp_path)
    await made.start_coordinator()
    await made.start_agents(["n1", "n2"])
    await made.wait_for_facts(facts.MemberJoined, 2)
    yield made
    await made.close()


def coordinator_becomes(world: ScriptedWorld, release: tuple[str, int, int]) -> None:
    """The running coordinator says that it is of this version."""
    assert world.coordinator
    world.coordinator.api.side = Side("the coordinator", *release, None)


def site(world: ScriptedWorld) -> tuple[str, ...]:
    return ("--coordinator", world.address, "--auth", f"secret:{world.folder.parent}/secret")


async def muster(world: ScriptedWorld, *command: str) -> int:
    """Runs a command as its user does."""
    options = parser().parse_args([command[0], *site(world), *command[1:]])
    return int(await options.row.run(options))


def newer_command(world: ScriptedWorld, told: list[str], address: str = "") -> CoordinatorClient:
    """The client of a command that is far newer than the coordinator."""
    versions = VersionCheck(told.append, Side("the muster command", *FAR, None))
    return CoordinatorClient(address or world.address, world.credentials, versions=versions)


@pytest.mark.parametrize("command", [("status", "1"), ("status",), ("nodes",), ("events", "1"), ("diagnose", "1")])
async def test_an_older_command_that_reads_works_and_says_once_that_it_does_not_fit(
    world: ScriptedWorld, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    coordinator_becomes(world, FAR)
    assert await muster(world, *command) == 0
    shown, said = capsys.readouterr()
    assert shown
    assert said.count(COORDINATOR_IS_NEWER) == 1


async def test_an_older_command_follows_a_job(world: ScriptedWorld) -> None:
    coordinator_becomes(world, FAR)
    told: list[str] = []
    versions = VersionCheck(told.append)
    async with CoordinatorClient(world.address, world.credentials, versions=versions) as client:
        async for view in client.follow(gang_ref("1"), told.append):
            assert view.gang_id == "g1"
            break
    assert [COORDINATOR_IS_NEWER in words for words in told] == [True]


@pytest.mark.parametrize(
    "command", [("cancel", "1"), ("swap", "1", "n1"), ("flush", "1"), ("drain", "n1", "--reason", "broken")]
)
async def test_an_older_command_that_changes_something_is_refused_in_words(
    world: ScriptedWorld, command: tuple[str, ...]
) -> None:
    assert world.coordinator
    coordinator_becomes(world, FAR)
    before = world.coordinator.engine.journal.position
    with pytest.raises(SiteFault, match=r"docs/operations/upgrade.md allows side by side. Nothing was done") as refused:
        await muster(world, *command)
    assert refused.value.message.startswith(COORDINATOR_IS_NEWER)
    assert "docs/operations/upgrade.md" in refused.value.hint
    assert world.coordinator.engine.journal.position == before


async def test_submit_asks_before_it_queues_a_job(world: ScriptedWorld) -> None:
    coordinator_becomes(world, FAR)
    settings = Site.load(coordinator=world.address, auth=f"secret:{world.folder.parent}/secret")
    async with Registration(settings) as registration:
        with pytest.raises(SiteFault) as refused:
            await registration.wait_for_answer(force=False)
    assert refused.value.message.startswith(COORDINATOR_IS_NEWER)
    assert "Nothing was queued" in refused.value.hint


async def test_versions_that_follow_each_other_fit(world: ScriptedWorld, capsys: pytest.CaptureFixture[str]) -> None:
    coordinator_becomes(world, NEXT)
    assert await muster(world, "status", "1") == 0
    assert await muster(world, "cancel", "1") == 0
    assert "protocol" not in capsys.readouterr().err


async def test_a_command_of_the_version_that_says_nothing_is_told_too(world: ScriptedWorld) -> None:
    """Its words for the status show the coordinator's. For FAILED_PRECONDITION it would ask for the munge key."""
    coordinator_becomes(world, FAR)
    async with open_channel(world.address, world.credentials) as channel:
        stub = api_pb2_grpc.MusterStub(channel)
        call = stub.Describe(gang_ref("1"))
        assert (await call).gang_id == "g1"
        assert read_metadata("", await call.initial_metadata()).version == "9.0.0"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Cancel(gang_ref("1"))
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "the muster command (muster 0.1.0 or older) speaks protocol 1" in (refused.value.details() or "")


async def test_what_is_no_version_counts_as_none(world: ScriptedWorld) -> None:
    coordinator_becomes(world, FAR)
    async with open_channel(world.address, world.credentials, metadata=((RELEASE_KEY, b"\xff\xff"),)) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"0\.1\.0 or older"):
            await api_pb2_grpc.MusterStub(channel).Cancel(gang_ref("1"))


async def test_a_newer_command_reads_from_an_older_coordinator_and_changes_nothing(world: ScriptedWorld) -> None:
    told: list[str] = []
    async with newer_command(world, told) as client:
        assert len((await client.nodes()).nodes) == 3
        assert len(await client.gangs()) == 1
        with pytest.raises(SiteFault) as refused:
            await client.cancel(gang_ref("1"))
        with pytest.raises(SiteFault):
            await client.check()
    assert refused.value.message.startswith(COMMAND_IS_NEWER)
    assert [words.startswith(COMMAND_IS_NEWER) for words in told] == [True]


class _Silent(api_pb2_grpc.MusterServicer):
    """The API of a coordinator that says nothing of its version, and has one method only."""

    async def Describe(self, request: api_pb2.GangRef, context: Any) -> api_pb2.GangView:
        if request.gang_id != "g1":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such job, or not yours")
        return api_pb2.GangView(gang_id="g1")


async def test_a_newer_command_knows_a_coordinator_that_says_nothing_by_that(world: ScriptedWorld) -> None:
    server = make_server(world.credentials, COORDINATOR)
    api_pb2_grpc.add_MusterServicer_to_server(_Silent(), server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    await server.start()
    told: list[str] = []
    async with newer_command(world, told, address) as client:
        assert (await client.describe(gang_ref("g1"))).gang_id == "g1"
        with pytest.raises(SiteFault, match="speaks protocol 1"):
            await client.check()
    assert [words.startswith(SILENT_IS_OLDER) for words in told] == [True]
    async with CoordinatorClient(address, world.credentials) as client:
        await client.check()
        with pytest.raises(SiteFault, match="the coordinator is older than this command"):
            await client.nodes()
    await server.stop(None)


def test_the_methods_that_read_exist() -> None:
    services = (api_pb2.DESCRIPTOR, diagnosis_pb2.DESCRIPTOR, goodput_pb2.DESCRIPTOR)
    known = {method for file in services for one in file.services_by_name.values() for method in one.methods_by_name}
    assert known - READING == {"Register", "Cancel", "Flush", "Swap", "Drain"}
    assert known > READING
