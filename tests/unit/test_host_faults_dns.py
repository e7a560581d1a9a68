"""DNS is gone. The name server here is real and silent: it has a network and /etc/resolv.conf of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from muster.daemon.coordinator.core.state import events, facts
from muster.daemon.host.name_resolution import NameResolver, NameUnresolved
from muster.daemon.testing.scripted_world import NODES, ScriptedWorld
from muster.daemon.transport.management_hosts import ManagementHosts
from muster.v1 import agent_pb2

DEADLINE_S = 120.0
UNSHARE = ["unshare", "--mount", "--net"]
if os.getuid() != 0:
    UNSHARE += ["--user", "--map-root-user"]

SILENT_SERVER = """
import asyncio, json, logging, socket, sys, threading
from pathlib import Path
from muster.daemon.host.name_resolution import NameResolver, NameUnresolved
from muster.daemon.node.daemon import own_address
from muster.daemon.transport.identity import SecretCredentials
from muster.daemon.transport.reachability import Probed, probe

hosts, secret = map(Path, sys.argv[1:])
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("127.0.0.1", 53))
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger().addHandler(Keep())
logging.getLogger().setLevel(logging.INFO)

async def failure(awaitable):
    try:
        return str(await awaitable)
    except NameUnresolved as error:
        return f"unresolved: {error}"

async def main():
    found = {}
    names = NameResolver(timeout_s=0.3)
    found["before"] = await failure(names("n7"))
    hosts.write_text("")
    found["known"] = await failure(names("n7"))
    found["unknown"] = await failure(names("n8"))
    found["daemon"] = await failure(own_address("n8:7070", names))
    found["probe"] = await failure(probe(Probed("n8:7071", "n8", "x"), SecretCredentials(secret), 0.4, names=names))
    many = await asyncio.gather(*(failure(names(f"m{number}")) for number in range(200)))
    found["many"] = sum(text.startswith("unresolved") for text in many)
    found["threads"] = sum(thread.name == "name-resolution" for thread in threading.enumerate())
    found["others"] = await asyncio.to_thread(lambda: "not held up")
    hosts.write_text("192.0.2.7 n7\\n192.0.2.8 n8\\n")
    patient = NameResolver(timeout_s=60.0)
    found["after"] = await failure(patient("n8"))
    return found

found = asyncio.run(main())
print(json.dumps(found | {"lines": lines}))
"""


@pytest.mark.skipif(
    subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=60).returncode != 0,
    reason="no namespaces can be made here",
)
def test_a_silent_name_server_holds_up_nothing_and_names_keep_their_addresses(tmp_path: Path) -> None:
    hosts, resolv, secret = tmp_path / "hosts", tmp_path / "resolv.conf", tmp_path / "secret"
    hosts.write_text("192.0.2.7 n7\n")
    resolv.write_text("nameserver 127.0.0.1\noptions timeout:2 attempts:1\n")
    secret.write_bytes(bytes(32))
    secret.chmod(0o600)
    mounts = f"mount --bind {resolv} /etc/resolv.conf && mount --bind {hosts} /etc/hosts"
    script = f'ip link set lo up && {mounts} && exec "$@"'
    program = [sys.executable, "-Ic", SILENT_SERVER, str(hosts), str(secret)]
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", script, "sh", *program], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["before"] == found["known"] == "{'192.0.2.7'}"
    unresolved = f"unresolved: n8 can't be resolved on {os.uname().nodename}: no name server"
    for asked in ("unknown", "daemon", "probe"):
        assert found[asked].startswith(unresolved), found
    assert found["many"] == 200
    assert 1 <= found["threads"] <= 8
    assert found["others"] == "not held up"
    assert found["after"] == "{'192.0.2.8'}"
    assert len(found["lines"]) == 1, found["lines"]
    assert "n7 can't be resolved" in found["lines"][0]
    assert "Names keep the addresses that they had last. Repair DNS" in found["lines"][0]


async def no_answer(name: str) -> set[str]:
    """A name server that does not answer."""
    raise NameUnresolved(f"{name} can't be resolved on mgmt1: no name server answers")


async def test_jobs_start_and_recover_without_dns(tmp_path: Path) -> None:
    world = ScriptedWorld.create(tmp_path)
    await world.start_coordinator(resolve=no_answer)
    await world.start_agents(NODES)
    await world.wait_for_duty("RUN 1", ["n1", "n2"])
    for agent in world.agents.values():
        agent.unreachable["n2"] = agent_pb2.SILENCE_CLOSED
    await world.agents["n2"].die()
    await world.wait_for_duty("RUN 2", ["n1", "n3"])
    assert [record.node for record in await world.wait_for_facts(facts.MemberRemoved)] == ["n2"]
    await world.close()


async def test_a_node_that_is_known_attaches_without_dns_and_another_one_later(tmp_path: Path) -> None:
    world = ScriptedWorld.create(tmp_path)
    await world.start_coordinator(resolve=no_answer)
    assert world.coordinator
    known = events.NodeAttached("n2", "boot", "i", "127.0.0.1:7071", ("127.0.0.1",))
    world.coordinator.engine.post(known)
    await world.send_signal("n2", 79)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await world.send_signal("n1", 79)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "the addresses of n1 are unknown" in str(refused.value.details())
    assert "no name server answers" in str(refused.value.details())
    await world.close()


async def test_a_management_host_stays_one_while_no_name_server_answers() -> None:
    answers = {"mgmt1": {"10.0.0.1"}}

    def look_up(name: str) -> set[str]:
        if not answers:
            raise OSError("Temporary failure in name resolution")
        return answers[name]

    hosts, names = ManagementHosts(["mgmt1"], []), NameResolver(look_up)
    await hosts.resolve_names(names)
    answers.clear()
    await hosts.resolve_names(names)
    assert hosts.includes("10.0.0.1")
    answers["mgmt1"] = set()  # a name server says that there is no such name
    await hosts.resolve_names(names)
    assert not hosts.includes("10.0.0.1")


async def test_a_name_that_is_asked_for_again_waits_for_the_first_question() -> None:
    asked: list[str] = []

    def look_up(name: str) -> set[str]:
        asked.append(name)
        return {"10.0.0.1"}

    names = NameResolver(look_up)
    async with asyncio.timeout(DEADLINE_S):
        assert await asyncio.gather(*(names("n1") for _ in range(100))) == [{"10.0.0.1"}] * 100
    assert asked == ["n1"]
