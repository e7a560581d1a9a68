"""The firewall rules of systemd/nftables.d, loaded as they are, between network namespaces of this kernel.

The node (or the management node) has links to a management node, to another node and to a stranger.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from muster.daemon.host import clock
from muster.daemon.host.kept_memory_client import send_request
from muster.daemon.host.port_range import PortRange
from muster.daemon.transport.identity import SecretCredentials
from muster.daemon.transport.server_limits import NODE_DAEMON, agent_limits
from muster.daemon.transport.site_config import PLAIN_TEXT

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "systemd" / "nftables.d"
FLOOD = Path(__file__).with_name("connection_flood.py")
AGENT_LIMIT = 16
"""Connections from one address to one port, in muster-agents.nft."""
COORDINATOR_LIMIT = 256
"""Connections from one address, in muster-coordinator.nft."""
WAIT_S = 120.0
"""Ends a wait that would never end."""

ADDRESSES = {
    "management": ("192.0.2.1/24", "2001:db8:1::1/64"),
    "node": ("203.0.113.1/24", "2001:db8:3::1/64"),
    "stranger": ("198.51.100.1/24", "2001:db8:2::1/64"),
}
SERVED = {
    "management": ("192.0.2.254/24", "2001:db8:1::fe/64"),
    "node": ("203.0.113.254/24", "2001:db8:3::fe/64"),
    "stranger": ("198.51.100.254/24", "2001:db8:2::fe/64"),
}
"""The server's addresses on the link to each of them."""

PROBE = """
import asyncio, sys
from pathlib import Path
from muster.daemon.transport.identity import SecretCredentials
from muster.daemon.transport.reachability import Probed, probe
probed = Probed(sys.argv[1], "n1", "musterd/n1")
print(asyncio.run(probe(probed, SecretCredentials(Path(sys.argv[2])), 5.0)))
"""
COORDINATOR = """
import asyncio, sys
from pathlib import Path
from muster.daemon.transport.channel import bind, make_server
from muster.daemon.transport.identity import SecretCredentials
from muster.daemon.transport.server_limits import COORDINATOR
async def serve():
    server = make_server(SecretCredentials(Path(sys.argv[1])), COORDINATOR)
    bind(server, ":7070")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()
asyncio.run(serve())
"""
AGENT = """
import asyncio, os, sys
from pathlib import Path
from muster.daemon.agent.failure_detector.peers import AgentIdentity, PeerService, make_agent_server
from muster.daemon.agent.listening import listen
from muster.daemon.transport import call_binding
from muster.daemon.transport.authority import Authority
from muster.daemon.transport.identity import SecretCredentials
from muster.daemon.host.port_range import PortRange
from muster.daemon.transport.server_limits import agent_limits
from muster.daemon.transport.tls import ServerKey, certificate_name
from muster.v1.peer_pb2 import PeerAck
class Shards:
    async def Stored(self, request, context):
        return PeerAck(refused="answered")
async def serve(secret, authority, ports):
    identity, key, site = AgentIdentity("g", "n1", "i", os.getuid()), ServerKey("agent/g/n1"), Authority.create("site")
    key.use(site.issue(key.public_key, [certificate_name(call_binding.name_of_agent("g", "n1"))]))
    Path(authority).write_bytes(site.pem)
    service = PeerService(identity, Shards(), lambda: None)
    server = make_agent_server(SecretCredentials(Path(secret)), agent_limits(2), identity, service, tls=True)
    found = listen(server, "0.0.0.0:0", PortRange.parse(ports), key.certificates)
    await server.start()
    print(found, flush=True)
    await server.wait_for_termination()
asyncio.run(serve(*sys.argv[1:]))
"""
MEMBER = """
import asyncio, sys
from pathlib import Path
import grpc
from muster.daemon.agent.failure_detector.peers import PeerChannels
from muster.daemon.transport import call_binding
from muster.daemon.transport.identity import SecretCredentials
from muster.daemon.transport.reachability import Probed, probe
from muster.daemon.transport.tls import Trust
from muster.v1.peer_pb2 import StoredReport
async def call(address, secret, authority):
    credentials, pem = SecretCredentials(Path(secret)), Path(authority).read_bytes()
    trust, name = Trust(lambda: pem), call_binding.name_of_agent("g", "n1")
    try:
        stub = PeerChannels(credentials, "g", trust).stub_for("n1", address)
        print((await stub.Stored(StoredReport(gang_id="g", node="n2"), timeout=60)).refused)
    except grpc.aio.AioRpcError as error:
        print(error.code().name)
    print(await probe(Probed(address, "n1", name), credentials, 2.0, trust))
asyncio.run(call(*sys.argv[1:]))
"""
"""Calls an agent as another agent of its gang does, and probes it."""


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert not check or done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


class Network:
    """Namespaces: `server`, and one for each of `ADDRESSES`."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def inside(self, namespace: str, *command: str) -> list[str]:
        """The command line that runs `command` in a namespace."""
        return ["ip", "netns", "exec", f"{self.prefix}-{namespace}", *command]

    def load(self, rules: Path) -> None:
        """Load a file of rules on the server."""
        _run(*self.inside("server", "nft", "-f", str(rules)))

    def link(self, other: str) -> None:
        """Connect the server with `other`."""
        ours, theirs = f"{self.prefix}-server", f"{self.prefix}-{other}"
        _run("ip", "link", "add", other, "netns", ours, "type", "veth", "peer", "name", "server", "netns", theirs)
        for namespace, device, addresses in ((ours, other, SERVED[other]), (theirs, "server", ADDRESSES[other])):
            for address in addresses:
                nodad = ["nodad"] if ":" in address else []
                _run("ip", "-n", namespace, "address", "add", address, "dev", device, *nodad)
            _run("ip", "-n", namespace, "link", "set", device, "up")
            _run("ip", "-n", namespace, "link", "set", "lo", "up")

    @contextmanager
    def running(self, namespace: str, *command: str) -> Iterator[subprocess.Popen[str]]:
        """A process in a namespace; it is killed at the end."""
        with subprocess.Popen(
            self.inside(namespace, *command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    @contextmanager
    def flooded(
        self, namespace: str, address: str, port: int, connections: int, *flags: str
    ) -> Iterator[dict[str, int]]:
        """The server while a host of `namespace` holds as many connections as it gets. Yields what it got."""
        command = [sys.executable, str(FLOOD), address, str(port), str(connections), *flags]
        with self.running(namespace, *command) as process:
            assert process.stdout
            yield json.loads(process.stdout.readline())

    def probe(self, namespace: str, address: str, secret: Path) -> str:
        """A probe of musterd as the coordinator makes it: "None" if musterd answers."""
        return _run(*self.inside(namespace, sys.executable, "-c", PROBE, address, str(secret))).strip()


@pytest.fixture
def network() -> Iterator[Network]:
    if os.getuid() != 0 or not shutil.which("ip") or not shutil.which("nft"):
        pytest.skip("needs root, iproute2 and nftables")
    made = Network(f"muster-{secrets.token_hex(4)}")
    try:
        for namespace in ("server", *ADDRESSES):
            if subprocess.run(["ip", "netns", "add", f"{made.prefix}-{namespace}"], capture_output=True).returncode:
                pytest.skip("no network namespace can be made here")
        for other in ADDRESSES:
            made.link(other)
        yield made
    finally:
        for namespace in ("server", *ADDRESSES):
            _run("ip", "netns", "delete", f"{made.prefix}-{namespace}", check=False)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    SecretCredentials.create(tmp_path / "secret")
    return tmp_path / "secret"


@contextmanager
def _musterd(network: Network, secret: Path) -> Iterator[Path]:
    """A musterd on the node. Yields its local socket."""
    folder = secret.parent
    (folder / "kmsg").touch(mode=0o600)
    socket = folder / "memory.sock"
    flags = ["--coordinator=192.0.2.1:7070", f"--auth=secret:{secret}", "--listen=:7071", "--node=n1"]
    files = [f"--kmsg={folder / 'kmsg'}", f"--memory={socket}", f"--connections={PLAIN_TEXT}"]
    with network.running("server", sys.executable, "-m", "muster.daemon.node", *flags, *files):
        yield socket


def _wait_until_it_answers(network: Network, secret: Path) -> None:
    end = clock.monotonic() + WAIT_S
    while network.probe("management", "192.0.2.254:7071", secret) != "None":
        assert clock.monotonic() < end


@pytest.mark.long
def test_without_the_rule_a_stranger_holds_all_connections_of_a_node(network: Network, secret: Path) -> None:
    with _musterd(network, secret) as socket:
        _wait_until_it_answers(network, secret)
        with network.flooded("stranger", "198.51.100.254", 7071, 2000) as got:
            assert got["accepted"] > got["answered"] >= NODE_DAEMON.connections
            assert network.probe("management", "192.0.2.254:7071", secret) != "None"
            # Whoever calls over TCP, the local socket has descriptors of its own.
            answer, _ = send_request(str(socket), {"take": {"gang_id": "g"}}, timeout_s=WAIT_S)
            assert answer == {}


@pytest.mark.long
@pytest.mark.parametrize("family", [0, 1], ids=["IPv4", "IPv6"])
def test_with_the_rule_no_stranger_reaches_a_node_and_the_coordinator_does(
    network: Network, secret: Path, family: int
) -> None:
    with _musterd(network, secret):
        _wait_until_it_answers(network, secret)
        network.load(RULES / "muster-node.nft")
        mine = ADDRESSES["management"][1].partition("/")[0]
        _run(*network.inside("server", "nft", "add", "element", "inet", "muster_node", "coordinators6", f"{{{mine}}}"))
        served = [SERVED[who][family].partition("/")[0] for who in ("management", "stranger")]
        with network.flooded("stranger", served[1], 7071, 2000) as got:
            assert got == {"accepted": 0, "answered": 0}
            address = f"[{served[0]}]:7071" if family else f"{served[0]}:7071"
            assert network.probe("management", address, secret) == "None"
        # Nor does a user of the node itself.
        with network.flooded("server", ["127.0.0.1", "::1"][family], 7071, 200) as got:
            assert got["accepted"] == 0


@pytest.mark.long
@pytest.mark.parametrize("family", [0, 1], ids=["IPv4", "IPv6"])
def test_one_address_has_a_limited_number_of_connections_to_the_coordinator(
    network: Network, secret: Path, family: int
) -> None:
    served = {who: addresses[family].partition("/")[0] for who, addresses in SERVED.items()}
    with network.running("server", sys.executable, "-c", COORDINATOR, str(secret)) as coordinator:
        assert coordinator.stdout
        assert coordinator.stdout.readline() == "ready\n"
        with network.flooded("stranger", served["stranger"], 7070, 2000) as got:
            assert got == {"accepted": 2000, "answered": 2000}
        network.load(RULES / "muster-coordinator.nft")
        with (
            network.flooded("stranger", served["stranger"], 7070, 2000) as got,
            network.flooded("management", served["management"], 7070, 200) as other,
        ):
            assert got == {"accepted": COORDINATOR_LIMIT, "answered": COORDINATOR_LIMIT}
            assert other == {"accepted": 200, "answered": 200}
            if family:
                # A host that has a whole /64 counts as one.
                more = "2001:db8:2::2"
                stranger = f"{network.prefix}-stranger"
                _run("ip", "-n", stranger, "address", "add", f"{more}/64", "dev", "server", "nodad")
                with network.flooded("stranger", served["stranger"], 7070, 50, f"--own={more}") as second:
                    assert second["accepted"] == 0


class RunningAgent:
    """An agent with TLS, of a gang of two nodes, on the server. It listens on a port of `ports`."""

    def __init__(self, network: Network, secret: Path, ports: PortRange) -> None:
        self._network, self._secret = network, secret
        self._authority, self._ports = secret.with_name("authority.pem"), ports
        self.port = 0

    @contextmanager
    def running(self) -> Iterator[RunningAgent]:
        """The agent, from its start to its end."""
        given = [str(self._secret), str(self._authority), str(self._ports)]
        with self._network.running("server", sys.executable, "-c", AGENT, *given) as process:
            assert process.stdout
            self.port = int(process.stdout.readline())
            yield self

    def called(self, namespace: str, host: str) -> list[str]:
        """What a call from a namespace and a probe come to: ["answered", "None"], if the agent answers."""
        given = [_address(host, self.port), str(self._secret), str(self._authority)]
        return _run(*self._network.inside(namespace, sys.executable, "-c", MEMBER, *given)).split()


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@pytest.fixture
def agent(network: Network, secret: Path) -> Iterator[RunningAgent]:
    found = re.search(r"^define agent_ports = (\S+)$", (RULES / "muster-agents.nft").read_text(), re.MULTILINE)
    assert found
    with RunningAgent(network, secret, PortRange.parse(found[1])).running() as running:
        yield running


@pytest.mark.long
def test_without_the_rule_a_stranger_holds_all_connections_of_an_agent(network: Network, agent: RunningAgent) -> None:
    assert agent.called("node", "203.0.113.254") == ["answered", "None"]
    with network.flooded("stranger", "198.51.100.254", agent.port, 300, "--tls") as got:
        assert got["answered"] == agent_limits(2).connections
        assert agent.called("node", "203.0.113.254") == ["UNAVAILABLE", "Reachability.ACCEPTED"]


@pytest.mark.long
def test_without_the_rule_a_member_connects_when_a_strangers_connection_ends(
    network: Network, agent: RunningAgent
) -> None:
    """The stranger opens every connection again that ends."""
    end = clock.monotonic() + WAIT_S
    with network.flooded("stranger", "198.51.100.254", agent.port, 300, "--tls"):
        while agent.called("node", "203.0.113.254")[0] != "answered":
            assert clock.monotonic() < end


@pytest.mark.long
@pytest.mark.parametrize("family", [0, 1], ids=["IPv4", "IPv6"])
def test_with_the_rule_nobody_holds_the_connections_of_an_agent(
    network: Network, agent: RunningAgent, family: int
) -> None:
    network.load(RULES / "muster-agents.nft")
    nodes = "2001:db8:1::1, 2001:db8:3::/64"
    _run(*network.inside("server", "nft", "add", "element", "inet", "muster_agents", "hosts6", f"{{{nodes}}}"))
    served = {who: addresses[family].partition("/")[0] for who, addresses in SERVED.items()}
    with (
        network.flooded("stranger", served["stranger"], agent.port, 300, "--tls") as stranger,
        network.flooded("server", ["127.0.0.1", "::1"][family], agent.port, 300, "--tls") as user,
        network.flooded("node", served["node"], agent.port, 300, "--tls") as node,
    ):
        assert stranger == user == {"accepted": 0, "answered": 0}
        assert node == {"accepted": AGENT_LIMIT, "answered": AGENT_LIMIT}
        # The hosts of other addresses, here the coordinator's, are not affected.
        assert agent.called("management", served["management"]) == ["answered", "None"]
    assert agent.called("node", served["node"]) == ["answered", "None"]


@pytest.mark.long
def test_an_open_connection_outlives_the_loading_of_the_rule(network: Network, agent: RunningAgent) -> None:
    with network.flooded("node", "203.0.113.254", agent.port, 100, "--tls") as got:
        assert got["answered"] == 100
        network.load(RULES / "muster-agents.nft")
        held = _run(*network.inside("server", "ss", "-Htn", "state", "established", f"( sport = :{agent.port} )"))
        assert len(held.splitlines()) == 100


def test_the_documents_name_the_range_of_the_rules() -> None:
    rules, page = (RULES / "muster-agents.nft").read_text(), (ROOT / "docs" / "operations" / "settings.md").read_text()
    assert "define agent_ports = 61000-61999" in rules
    assert '`"61000-61999"`' in page
