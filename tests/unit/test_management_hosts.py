"""From which hosts the rights of an operator count."""

import asyncio
import logging
from collections.abc import Mapping

import pytest

from muster.daemon.transport.authorization import Rights
from muster.daemon.transport.identity import Caller
from muster.daemon.transport.management_hosts import ManagementHosts, check_host

ROOT, SLURM, OPERATOR, OWNER = 0, 64030, 500, 1001
MGMT, NODE = "10.0.0.1", "10.0.7.7"
DEADLINE_S = 60.0
CANCEL, NODE_ATTACH = "/muster.v1.Muster/Cancel", "/muster.v1.NodeService/Attach"


class NameServer:
    """Answers with what it holds, and counts the questions."""

    def __init__(self, names: Mapping[str, set[str]]) -> None:
        self.names = dict(names)
        self.questions = 0

    async def resolve(self, name: str) -> set[str]:
        self.questions += 1
        return self.names.get(name, set())


def _rights(*hosts: str) -> Rights:
    return Rights(frozenset({OPERATOR}), own_uid=SLURM, management_hosts=ManagementHosts(hosts, [MGMT]))


@pytest.mark.parametrize("uid", [ROOT, SLURM, OPERATOR])
def test_an_operator_is_one_on_a_management_host_only(uid: int) -> None:
    rights = _rights(MGMT)
    assert rights.allows(CANCEL, Caller(uid, uid, MGMT), owner_uid=OWNER)
    assert not rights.allows(CANCEL, Caller(uid, uid, NODE), owner_uid=OWNER)
    assert rights.calls_from_elsewhere(Caller(uid, uid, NODE))
    assert not rights.calls_from_elsewhere(Caller(uid, uid, MGMT))


def test_root_of_a_node_speaks_for_its_node_and_its_jobs_owner_for_the_job() -> None:
    rights = _rights(MGMT)
    assert rights.allows(NODE_ATTACH, Caller(ROOT, ROOT, NODE), node_addresses={NODE})
    assert not rights.allows(NODE_ATTACH, Caller(ROOT, ROOT, NODE), node_addresses={"10.0.7.8"})
    assert rights.allows(CANCEL, Caller(OWNER, OWNER, NODE), owner_uid=OWNER)
    assert not rights.calls_from_elsewhere(Caller(OWNER, OWNER, NODE))


def test_without_the_setting_every_host_is_one() -> None:
    assert _rights().allows(CANCEL, Caller(ROOT, ROOT, NODE), owner_uid=OWNER)


async def test_a_name_has_the_addresses_that_it_has_now(caplog: pytest.LogCaptureFixture) -> None:
    server, hosts = NameServer({"mgmt1": {MGMT}, "mgmt2": {"::ffff:10.0.0.2"}}), ManagementHosts(["mgmt1", "mgmt2"], [])
    assert not hosts.includes(MGMT), "it is not resolved yet"
    await hosts.resolve_names(server.resolve)
    assert hosts.includes(MGMT)
    assert hosts.includes("10.0.0.2")
    server.names = {"mgmt1": {"10.0.0.9"}}
    await hosts.resolve_names(server.resolve)
    assert hosts.includes("10.0.0.9")
    assert not hosts.includes(MGMT)
    assert not hosts.includes("10.0.0.2"), "its name can't be resolved any more"
    assert "management host mgmt2 of muster.toml can't be resolved: no call from it has an operator's" in caplog.text


async def test_a_name_that_is_never_resolved_is_no_host_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    hosts = ManagementHosts(["mgmt1", MGMT], [])
    for _ in range(3):
        await hosts.resolve_names(NameServer({}).resolve)
    assert not hosts.includes(NODE)
    assert not hosts.includes("unix")
    assert hosts.includes(MGMT), "an address needs no name server"
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


async def test_names_are_resolved_at_once_and_after_each_pause() -> None:
    hosts = ManagementHosts(["mgmt1"], [])
    known: list[tuple[bool, bool]] = []
    asked_again = asyncio.Event()

    async def resolve(name: str) -> set[str]:
        known.append((hosts.includes(MGMT), hosts.includes("10.0.0.9")))
        if len(known) == 3:
            asked_again.set()
        return {MGMT} if len(known) == 1 else {"10.0.0.9"}

    running = asyncio.create_task(hosts.run(resolve, interval_s=0))
    async with asyncio.timeout(DEADLINE_S):
        await asked_again.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert known[:3] == [(False, False), (True, False), (False, True)]


async def test_addresses_are_never_resolved() -> None:
    server = NameServer({})
    await ManagementHosts([MGMT, "fd00::1"], []).run(server.resolve)
    assert server.questions == 0


@pytest.mark.parametrize(
    ("entries", "resolved", "this_machine"),
    [
        (["10.0.0.1"], {}, True),  # the address of this machine
        (["mgmt1"], {"mgmt1": {"127.0.1.1"}}, True),  # as Debian's /etc/hosts has it
        (["10.0.0.2"], {}, False),
        (["mgmt2"], {"mgmt2": {"10.0.0.2"}}, False),
    ],
)
async def test_a_call_from_a_loopback_address_comes_from_this_machine(
    entries: list[str], resolved: dict[str, set[str]], *, this_machine: bool
) -> None:
    hosts = ManagementHosts(entries, [MGMT])
    await hosts.resolve_names(NameServer(resolved).resolve)
    assert hosts.includes("127.0.0.1") is this_machine
    assert hosts.includes("::1") is this_machine


@pytest.mark.parametrize(("entry", "form"), [("::ffff:10.0.0.1", "10.0.0.1"), ("FD00::0:1", "fd00::1"), ("a-1", "a-1")])
def test_an_entry_is_compared_in_one_form(entry: str, form: str) -> None:
    assert check_host(entry) == form


@pytest.mark.parametrize(
    "entry",
    [
        "",
        " ",
        "10.0.0.300",
        "10.0.0.0/24",
        "mgmt1:7070",
        "-mgmt1",
        "mgmt1\n",
        "a b",
        "a..b",
        "fe80::1%eth0",
        "*",
        "0.0.0.0",
    ],
)
def test_what_is_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=r"is (neither a host name nor an IP address|not the address of a host)"):
        check_host(entry)
