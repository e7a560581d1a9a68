"""In plain text, a credential that one coordinator was shown is worth nothing at the other one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import grpc
import grpc.aio
import pytest

from muster.daemon.coordinator.coordinator_names import CoordinatorNames
from muster.daemon.host.name_resolution import NameUnresolved
from muster.daemon.testing.scripted_world import ScriptedWorld
from muster.daemon.transport import call_binding
from muster.daemon.transport.channel import CREDENTIAL_KEY
from muster.v1 import api_pb2, api_pb2_grpc

BOTH = frozenset({"ctl-a", "ctl-b"})
ELSEWHERE = {"203.0.113.2"}
LIST = "/muster.v1.Muster/List"


class Names:
    """Resolves names as the test says. A name that it lacks has no answer."""

    def __init__(self, addresses: Mapping[str, set[str]]) -> None:
        self.asked = 0
        self._addresses = addresses

    async def __call__(self, name: str) -> set[str]:
        self.asked += 1
        if name not in self._addresses:
            raise NameUnresolved(f"{name} can't be resolved")
        return self._addresses[name]


async def _list_with_credential_for(server: str, world: ScriptedWorld) -> str:
    """The status of one call of the coordinator, with a credential that was made for `server`."""
    payload = call_binding.payload_of_call(LIST, server, b"")
    metadata = grpc.aio.Metadata((CREDENTIAL_KEY, world.credentials.issue(payload)))
    async with grpc.aio.insecure_channel(world.address) as channel:
        try:
            await api_pb2_grpc.MusterStub(channel).List(api_pb2.ListRequest(), metadata=metadata)  # type: ignore[call-arg]
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


async def test_a_credential_for_the_other_coordinator_is_refused_in_plain_text(tmp_path: Path) -> None:
    """The attack: who has taken over one coordinator shows the other one the credentials that it gets."""
    world = ScriptedWorld.create(tmp_path)
    world.settings["configured_names"] = BOTH
    for mine, other in (("ctl-a", "ctl-b"), ("ctl-b", "ctl-a")):  # the second one takes over
        resolve = Names({mine: {"127.0.1.1"}, other: ELSEWHERE})
        await world.start_coordinator(resolve=resolve)
        assert await _list_with_credential_for(mine, world) == "OK"
        assert await _list_with_credential_for(other, world) == "FAILED_PRECONDITION"
        await world.stop_coordinator()


async def test_a_configured_name_that_the_host_has_itself_needs_no_name_server() -> None:
    names, resolve = CoordinatorNames(BOTH, {"ctl-a", "localhost"}), Names({})
    assert not names.is_waiting
    await names.resolve_names(resolve)
    await names.run(resolve)
    assert (names.current, resolve.asked) == ({"ctl-a", "localhost"}, 0)


async def test_a_single_configured_name_is_this_coordinators_wherever_it_leads() -> None:
    names = CoordinatorNames({"ctl"}, {"mgmt1"})
    assert not names.is_waiting
    assert names.current == {"ctl", "mgmt1"}


async def test_a_name_counts_once_it_leads_here(caplog: pytest.LogCaptureFixture) -> None:
    here = ["10.0.0.1"]
    names = CoordinatorNames(BOTH, {"mgmt1"}, lambda: here)
    assert names.is_waiting
    await names.resolve_names(Names({"ctl-a": {"10.0.0.9"}}))
    assert names.current == {"mgmt1"}
    assert "none of the coordinators ctl-a ctl-b of the settings leads to an address of this host" in caplog.text
    here.append("10.0.0.9")
    await names.resolve_names(Names({"ctl-a": {"::ffff:10.0.0.9"}, "ctl-b": {"10.0.0.2"}}))
    assert names.current == {"ctl-a", "mgmt1"}
    assert not names.is_waiting
