"""What a wrong or unusual setting does to a connection: `connections` that differ, and host names with capitals."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from muster.daemon.host import private_file
from muster.daemon.testing.scripted_world import ScriptedWorld
from muster.daemon.transport import authority, call_binding
from muster.daemon.transport.authority import Authority
from muster.daemon.transport.channel import open_channel
from muster.daemon.transport.identity import Credentials, OtherServer
from muster.daemon.transport.site_config import Site
from muster.daemon.transport.tls import SAME_CONNECTIONS, CertificateFiles, Trust, explain
from muster.launcher.coordinator_client import CoordinatorClient
from muster.launcher.errors import LauncherError, SiteFault, Unavailable
from muster.v1 import api_pb2, api_pb2_grpc


@pytest.fixture(scope="module")
def site() -> Authority:
    return Authority.create("site")


@pytest.fixture
def trust(site: Authority) -> Trust:
    return Trust(lambda: site.pem)


@pytest.fixture
async def start(tmp_path: Path, site: Authority) -> AsyncIterator[Callable[..., object]]:
    """Starts a coordinator whose certificate has this name; None: one in plain text. Returns its world."""
    made = ScriptedWorld.create(tmp_path)

    async def started(name: str | None, **settings: object) -> ScriptedWorld:
        if name is not None:
            key = authority.make_key()
            private_file.replace(tmp_path / "c.key", authority.pem_of_key(key).decode())
            (tmp_path / "c.pem").write_bytes(site.issue(authority.bytes_of_public_key(key), [name]))
            settings["certificate_files"] = CertificateFiles(tmp_path / "c.pem", tmp_path / "c.key")
        made.settings.update(settings)
        await made.start_coordinator()
        return made

    yield started
    await made.close()


async def _answer(address: str, credentials: Credentials, trust: Trust | None) -> str:
    """The answer to one call: "OK", or the details of its error."""
    async with open_channel(address, credentials, trust=trust) as channel:
        try:
            await api_pb2_grpc.MusterStub(channel).List(api_pb2.ListRequest())
        except grpc.aio.AioRpcError as error:
            return error.details() or error.code().name
    return "OK"


@pytest.mark.parametrize(("certified", "dialled"), [("localhost", "LocalHost"), ("LocalHost", "localhost")])
async def test_capitals_in_a_name_do_not_count_for_tls_and_for_the_credential(
    start: Callable[..., object], trust: Trust, certified: str, dialled: str
) -> None:
    world = await start(certified)  # type: ignore[misc]
    port = world.coordinator.port
    assert await _answer(f"{dialled}:{port}", world.credentials, trust) == "OK"


def test_capitals_in_a_configured_name_do_not_count() -> None:
    site = Site.load(coordinator="Coordinator01:7070,[FD00::0001]:7070", environ={})
    assert site.coordinator_hosts() == {"coordinator01", "fd00::1"}


def test_the_names_of_a_server_are_compared_as_dns_does() -> None:
    """An older caller, or a person, writes a host as the settings do."""
    names = {"coordinator01", "fd00::1"}
    for server in ("coordinator01", "Coordinator01", "COORDINATOR01", "FD00:0::1"):
        assert call_binding.check_call(call_binding.payload_of_call("/m", server, b""), "/m", names)
    assert {name.lower() for name in call_binding.names_of_this_host()} == call_binding.names_of_this_host()
    assert os.uname().nodename.lower() in call_binding.names_of_this_host()


def test_capitals_count_in_the_names_of_nodes_and_gangs() -> None:
    names = {call_binding.name_of_agent("train-a", "n1")}
    for server in (call_binding.name_of_agent("Train-a", "n1"), call_binding.name_of_agent("train-a", "N1")):
        with pytest.raises(OtherServer):
            call_binding.check_call(call_binding.payload_of_call("/m", server, b""), "/m", names)


async def _error_of_command(world: ScriptedWorld, trust: Trust | None) -> LauncherError:
    """The error of a `muster` command."""
    with pytest.raises(LauncherError) as caught:
        async with CoordinatorClient(world.address, world.credentials, trust) as client:
            await client.has_gang("g1")
    return caught.value


async def test_a_tls_caller_of_a_coordinator_in_plain_text_is_told_of_the_setting(
    start: Callable[..., object], trust: Trust
) -> None:
    world = await start(None)  # type: ignore[misc]
    error = await _error_of_command(world, trust)
    assert isinstance(error, SiteFault)
    words = f"the server at {world.address} answers in plain text, and this host uses TLS: no credential was sent"
    assert (str(error), error.hint) == (
        words,
        f"{SAME_CONNECTIONS}. If they are the same, another program listens there",
    )
    logged = explain(await _answer(world.address, world.credentials, trust), trust)
    assert logged.startswith(f"the server answers in plain text, and this host uses TLS. {SAME_CONNECTIONS} (failed to")


async def test_a_caller_in_plain_text_of_a_coordinator_with_tls_is_told_of_the_setting(
    start: Callable[..., object],
) -> None:
    world = await start("127.0.0.1")  # type: ignore[misc]
    error = await _error_of_command(world, None)
    assert isinstance(error, Unavailable)
    assert error.hint.endswith(f". Or it uses TLS, and this host does not. {SAME_CONNECTIONS}")
    logged = explain(await _answer(world.address, world.credentials, None), None)
    assert logged.endswith(f". Does the server use TLS? This host does not. {SAME_CONNECTIONS}")


async def test_a_coordinator_that_is_not_there_is_no_matter_of_the_setting(
    start: Callable[..., object], trust: Trust
) -> None:
    world = await start(None)  # type: ignore[misc]
    address = world.address
    await world.stop_coordinator()
    for own in (trust, None):
        details = await _answer(address, world.credentials, own)
        assert details != "OK"
        assert explain(details, own) == f"nothing listens at {address} (connection refused)"
