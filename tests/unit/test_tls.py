"""TLS between Muster's processes: who is proved to whom, and what a missing, wrong or new certificate does."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from muster.daemon.agent.failure_detector.peers import AgentIdentity, PeerChannels, PeerService, make_agent_server
from muster.daemon.coordinator.core.state import facts
from muster.daemon.host import clock, private_file
from muster.daemon.node.daemon import NodeDaemon, NodeSettings
from muster.daemon.node.sensors.sensor import SensorPaths
from muster.daemon.testing.no_shards import NoShards
from muster.daemon.testing.scripted_agent import ScriptedAgent
from muster.daemon.testing.scripted_world import DEADLINE_S, ScriptedWorld, spec
from muster.daemon.transport import authority, call_binding
from muster.daemon.transport.authority import Authority
from muster.daemon.transport.channel import bind, make_server, open_channel
from muster.daemon.transport.identity import Proof, SecretCredentials
from muster.daemon.transport.reachability import Probed, Reachability, probe
from muster.daemon.transport.server_limits import COORDINATOR, agent_limits
from muster.daemon.transport.tls import (
    RENEW_AFTER_S,
    CertificateFiles,
    ServerKey,
    TlsError,
    Trust,
    certificate_name,
    is_proof_failure,
    trust_in_file,
)
from muster.v1 import api_pb2, api_pb2_grpc, common_pb2_grpc, peer_pb2
from muster.v1.common_pb2 import PingReply, PingRequest

LOOPBACK = "127.0.0.1"


class Counting(SecretCredentials):
    """Counts the credentials that are made."""

    issued = 0

    def issue(self, payload: str) -> str:
        self.issued += 1
        return super().issue(payload)


@pytest.fixture
def credentials(tmp_path: Path) -> SecretCredentials:
    return Counting.create(tmp_path / "secret")


@pytest.fixture(scope="module")
def site() -> Authority:
    return Authority.create("site")


def write_files(folder: Path, issuing: Authority, *names: str, days: float = 1) -> tuple[Path, Path]:
    """The certificate and the key of a coordinator with these names, in `folder`."""
    folder.mkdir(exist_ok=True)
    key = authority.make_key()
    private_file.replace(folder / "c.key", authority.pem_of_key(key).decode())
    (folder / "c.pem").write_bytes(issuing.issue(authority.bytes_of_public_key(key), names, days))
    return folder / "c.pem", folder / "c.key"


def trust_in(*authorities: Authority) -> Trust:
    return Trust(lambda: b"".join(known.pem for known in authorities))


class Probe(common_pb2_grpc.ProbeServiceServicer):
    async def Ping(self, request: PingRequest, context: Any) -> PingReply:
        return PingReply(nonce=request.nonce, node="n1")


@asynccontextmanager
async def serving(credentials: SecretCredentials, certificates: grpc.ServerCredentials | None) -> AsyncIterator[int]:
    """A server on loopback. Yields its port."""
    server = make_server(credentials, COORDINATOR)
    common_pb2_grpc.add_ProbeServiceServicer_to_server(Probe(), server)
    port = bind(server, f"{LOOPBACK}:0", certificates)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def ping(
    port: int, credentials: SecretCredentials, trust: Trust | None, host: str = LOOPBACK, server: str = ""
) -> str:
    """One call. Returns "OK", or why it failed."""
    async with open_channel(f"{host}:{port}", credentials, trust=trust, server=server) as channel:
        try:
            await common_pb2_grpc.ProbeServiceStub(channel).Ping(PingRequest(), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            return error.details() or error.code().name
    return "OK"


async def test_a_server_proves_the_name_that_was_dialled(
    tmp_path: Path, credentials: SecretCredentials, site: Authority
) -> None:
    files = CertificateFiles(*write_files(tmp_path / "tls", site, LOOPBACK))
    async with serving(credentials, files.certificates()) as port:
        assert await ping(port, credentials, trust_in(site)) == "OK"


@pytest.mark.parametrize("impostor", ["another authority", "another name", "an expired certificate", "plain text"])
async def test_an_impostor_gets_no_credential(
    tmp_path: Path, credentials: Counting, site: Authority, impostor: str
) -> None:
    issuing = Authority.create("impostor") if impostor == "another authority" else site
    name = "mgmt2" if impostor == "another name" else LOOPBACK
    days = -0.5 if impostor == "an expired certificate" else 1
    files = CertificateFiles(*write_files(tmp_path / "tls", issuing, name, days=days))
    seen = Seen(credentials)
    async with serving(seen, None if impostor == "plain text" else files.certificates()) as port:
        refused = await ping(port, credentials, trust_in(site))
        assert refused != "OK"
        assert is_proof_failure(refused) or impostor == "plain text"
    assert seen.tokens == []


class Seen(SecretCredentials):
    """What a server is shown. It accepts everything."""

    def __init__(self, other: SecretCredentials) -> None:
        self.tokens: list[str] = []

    def check(self, token: str) -> Proof:
        self.tokens.append(token)
        return Proof(os.getuid(), os.getgid(), call_binding.payload_of_call("", "", b""))


async def test_a_caller_without_tls_gets_nothing(
    tmp_path: Path, credentials: SecretCredentials, site: Authority
) -> None:
    files = CertificateFiles(*write_files(tmp_path / "tls", site, LOOPBACK))
    async with serving(credentials, files.certificates()) as port:
        assert await ping(port, credentials, None) != "OK"


@pytest.mark.parametrize(("version", "spoken"), [(ssl.TLSVersion.TLSv1_2, False), (ssl.TLSVersion.TLSv1_3, True)])
async def test_only_tls_1_3_is_spoken(
    tmp_path: Path, credentials: SecretCredentials, site: Authority, version: ssl.TLSVersion, spoken: bool
) -> None:
    files = CertificateFiles(*write_files(tmp_path / "tls", site, LOOPBACK))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=site.pem.decode())
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    async with serving(credentials, files.certificates()) as port:
        try:
            _, writer = await asyncio.open_connection(LOOPBACK, port, ssl=context)
        except (OSError, ssl.SSLError):
            assert not spoken
            return
        assert spoken
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        writer.close()


async def test_a_certificate_is_replaced_without_a_restart(
    tmp_path: Path, credentials: SecretCredentials, site: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    paths, renewed = write_files(tmp_path / "tls", site, LOOPBACK), Authority.create("renewed")
    files = CertificateFiles(*paths)
    async with serving(credentials, files.certificates()) as port:
        assert await ping(port, credentials, trust_in(site)) == "OK"
        paths[0].write_text("half a file")
        assert await ping(port, credentials, trust_in(site)) == "OK"
        assert "holds no certificate (PEM): the certificate that was read before is used" in caplog.text
        write_files(tmp_path / "tls", renewed, LOOPBACK, "mgmt1")
        assert await ping(port, credentials, trust_in(renewed)) == "OK"
        assert files.names == {LOOPBACK, "mgmt1"}
        assert is_proof_failure(await ping(port, credentials, trust_in(site)))
        assert await ping(port, credentials, trust_in(site, renewed)) == "OK"  # what clients have meanwhile


def test_the_authoritys_file_is_read_again_and_its_loss_changes_nothing(
    tmp_path: Path, site: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    path, other = tmp_path / "authority.pem", Authority.create("other")
    path.write_bytes(site.pem)
    trust = trust_in_file(path)
    path.write_bytes(site.pem + other.pem)
    assert trust.authorities() == site.pem + other.pem
    path.unlink()
    assert trust.authorities() == site.pem + other.pem
    assert "can't be read: No such file or directory: the certificates that were read before are used" in caplog.text


@pytest.mark.parametrize("damage", ["half a file", "half a second certificate", "no base64", "empty"])
def test_a_damaged_file_of_the_authority_is_not_used(
    tmp_path: Path, site: Authority, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """While the file is copied, a node must not take a half for the whole: it would know no coordinator."""
    path, half = tmp_path / "authority.pem", site.pem[: len(site.pem) // 2]
    path.write_bytes(b"# of the site \xc3\xa4\n" + site.pem)
    trust = trust_in_file(path)
    no_base64 = b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n"
    kinds = {"half a file": half, "half a second certificate": site.pem + half, "no base64": no_base64, "empty": b""}
    path.write_bytes(kinds[damage])
    assert trust.authorities() == b"# of the site \xc3\xa4\n" + site.pem
    assert "or a damaged one: the certificates that were read before are used" in caplog.text
    with pytest.raises(TlsError):
        trust_in_file(path)


def test_files_that_can_not_be_used_are_refused(tmp_path: Path, site: Authority) -> None:
    certificate, key = write_files(tmp_path / "a", site, LOOPBACK)
    _, other = write_files(tmp_path / "b", site, LOOPBACK)
    for given, words in (
        ((certificate, other), f"{other} is not the key of {certificate}"),
        ((key, key), f"{key} holds no certificate"),
        ((certificate, certificate), f"{certificate} holds no key"),
        ((certificate, tmp_path / "none"), f"{tmp_path / 'none'} can't be read: No such file or directory"),
    ):
        with pytest.raises(TlsError, match=words):
            CertificateFiles(*given)
    for path in (key, tmp_path / "none"):
        with pytest.raises(TlsError):
            trust_in_file(path)


@pytest.mark.parametrize(
    ("mode", "used"), [(0o600, True), (0o640, True), (0o644, False), (0o660, False), (0o602, False)]
)
def test_a_key_that_others_can_use_is_refused(tmp_path: Path, site: Authority, mode: int, used: bool) -> None:
    """The attack: a user of the coordinator's host reads its key, and acts as the coordinator."""
    certificate, key = write_files(tmp_path / "tls", site, LOOPBACK)
    key.chmod(mode)
    if used:
        assert CertificateFiles(certificate, key).names == {LOOPBACK}
        return
    with pytest.raises(TlsError, match=rf"^{key} has mode {mode:04o}: others can use it"):
        CertificateFiles(certificate, key)


def test_a_new_key_is_used_once_it_is_private(
    tmp_path: Path, site: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files = CertificateFiles(*write_files(tmp_path / "tls", site, LOOPBACK))
    _, key = write_files(tmp_path / "tls", site, "mgmt1")
    key.chmod(0o644)
    files.current()
    assert files.names == {LOOPBACK}
    assert "others can use it. Set 0600" in caplog.text
    key.chmod(0o600)
    files.current()
    assert files.names == {"mgmt1"}


@pytest.mark.parametrize("key", [b"", b"x" * 91, ec.generate_private_key(ec.SECP384R1())])
def test_no_certificate_is_issued_for_what_is_no_key_of_p256(site: Authority, key: Any) -> None:
    with pytest.raises(TlsError):
        site.issue(key if isinstance(key, bytes) else authority.bytes_of_public_key(key), ["n1"])


def test_the_issuing_authority_is_made_once_and_is_private(tmp_path: Path) -> None:
    made = authority.issuing_authority(tmp_path)
    assert authority.issuing_authority(tmp_path).pem == made.pem
    assert (tmp_path / "issuing-authority.key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "issuing-authority.pem").unlink()  # the coordinator died between the two files
    assert authority.issuing_authority(tmp_path).pem != made.pem


# -- a coordinator, its agents and its node daemons ------------------------------------------------------------------


@dataclass
class TlsWorld:
    """A coordinator with TLS. `trust`: whom its callers take for it."""

    scripted: ScriptedWorld
    trust: Trust


@pytest.fixture
async def world(tmp_path: Path, site: Authority) -> AsyncIterator[TlsWorld]:
    scripted = ScriptedWorld.create(tmp_path)
    scripted.trust = trust_in(site)
    scripted.settings["certificate_files"] = CertificateFiles(*write_files(tmp_path / "tls", site, LOOPBACK))
    await scripted.start_coordinator()
    yield TlsWorld(scripted, scripted.trust)
    await scripted.close()


async def test_agents_attach_and_get_certificates_with_which_others_know_them(world: TlsWorld) -> None:
    scripted = world.scripted
    await scripted.start_agents(["n1", "n2"])
    for name in ("n1", "n2"):
        agent = scripted.agents[name]
        async with asyncio.timeout(DEADLINE_S):
            await agent.wait_until(lambda agent=agent: bool(agent.certificate.certificate))  # type: ignore[misc]
    one, other = scripted.agents["n1"], scripted.agents["n2"]
    trust = Trust(lambda: one.certificate.authorities)
    named = call_binding.name_of_agent("g1", "n2")
    assert await probe(Probed(other.address, "n2", named), scripted.credentials, DEADLINE_S, trust) is None
    # An agent of another gang, or the agent of another node, at the same address.
    for wrong in (call_binding.name_of_agent("g2", "n2"), call_binding.name_of_agent("g1", "n1")):
        found = await probe(Probed(other.address, "n2", wrong), scripted.credentials, 0.5, trust)
        assert found is Reachability.ACCEPTED


async def test_an_agent_whose_key_is_none_is_refused(world: TlsWorld) -> None:
    agent = ScriptedAgent("n1", spec(), world.scripted.credentials, trust=world.trust)
    await agent.open()
    agent.hello.public_key = b"none"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await agent.attach(world.scripted.address)
    await agent.die()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "hello.public_key: this is no public key (DER)"


async def test_a_restarted_coordinator_knows_agents_by_the_certificates_that_they_have(world: TlsWorld) -> None:
    scripted = world.scripted
    await scripted.start_agents(["n1"])
    agent = scripted.agents["n1"]
    async with asyncio.timeout(DEADLINE_S):
        await agent.wait_until(lambda: bool(agent.certificate.certificate))
    await scripted.stop_coordinator()
    trust = Trust(lambda: authority.issuing_authority(scripted.folder).pem)
    probed = Probed(agent.address, "n1", call_binding.name_of_agent("g1", "n1"))
    assert await probe(probed, scripted.credentials, DEADLINE_S, trust) is None


async def test_an_agent_that_has_a_certificate_of_the_coordinators_authority_gets_no_other_one(world: TlsWorld) -> None:
    """After a restart all agents and daemons of a site attach at once: each new certificate would cost time."""
    scripted = world.scripted
    await scripted.start_agents(["n1"])
    agent = scripted.agents["n1"]
    for _ in range(2):
        async with asyncio.timeout(DEADLINE_S):
            await agent.wait_until(lambda: bool(agent.orders))
        received = agent.certificate.certificate
        await scripted.stop_coordinator()
        agent.certificate.Clear()
        agent.orders.clear()
        await scripted.start_coordinator()
    assert not received


async def test_a_coordinator_with_another_authority_issues_new_certificates(world: TlsWorld) -> None:
    scripted = world.scripted
    await scripted.start_agents(["n1"])
    agent = scripted.agents["n1"]
    async with asyncio.timeout(DEADLINE_S):
        await agent.wait_until(lambda: bool(agent.orders))
    await scripted.stop_coordinator()
    for path in scripted.folder.glob("issuing-authority.*"):
        path.unlink()
    agent.certificate.Clear()
    agent.orders.clear()
    await scripted.start_coordinator()
    async with asyncio.timeout(DEADLINE_S):
        await agent.wait_until(lambda: bool(agent.orders))
    assert authority.issuer_of(agent.certificate.certificate) == authority.issuing_authority(scripted.folder).identifier


async def test_a_caller_of_the_coordinator_that_trusts_another_authority_says_so(world: TlsWorld) -> None:
    other = trust_in(Authority.create("other"))
    async with open_channel(world.scripted.address, world.scripted.credentials, trust=other) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await api_pb2_grpc.MusterStub(channel).List(api_pb2.ListRequest())
    assert is_proof_failure(refused.value.details() or "")


class Heard(logging.Handler):
    """Sets an event once some text is logged."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self.event = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self.event.set()


async def test_a_node_comes_back_by_itself_after_the_coordinators_certificate_had_expired(
    tmp_path: Path, site: Authority
) -> None:
    scripted, heard = ScriptedWorld.create(tmp_path), Heard("certificate has expired")
    paths = write_files(tmp_path / "tls", site, LOOPBACK, days=-0.5)
    scripted.settings["certificate_files"] = CertificateFiles(*paths)
    await scripted.start_coordinator()
    assert scripted.coordinator
    (tmp_path / "kmsg").touch(mode=0o600)
    settings = NodeSettings(
        node="n1",
        coordinator=scripted.address,
        listen=f"{LOOPBACK}:0",
        credentials=scripted.credentials,
        roots=SensorPaths(kmsg=tmp_path / "kmsg"),
        trust=trust_in(site),
    )
    logging.getLogger("muster.daemon.node").addHandler(heard)
    daemon = asyncio.create_task(NodeDaemon(settings).run())
    async with asyncio.timeout(DEADLINE_S):
        await heard.event.wait()
    write_files(tmp_path / "tls", site, LOOPBACK)
    await scripted.wait_for_facts(facts.NodeRegistered)
    address = scripted.coordinator.engine.core.state.node("n1").probe_address
    issuing = Trust(lambda: authority.issuing_authority(scripted.folder).pem)
    probed = Probed(address, "n1", call_binding.name_of_node_daemon("n1"))
    assert await probe(probed, scripted.credentials, DEADLINE_S, issuing) is None
    daemon.cancel()
    await asyncio.gather(daemon, return_exceptions=True)
    logging.getLogger("muster.daemon.node").removeHandler(heard)
    await scripted.close()


def test_a_coordinator_says_once_a_day_that_its_certificate_expires_soon(
    tmp_path: Path, site: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    now = clock.wall()
    files = CertificateFiles(*write_files(tmp_path / "tls", site, LOOPBACK, days=31), lambda: now)
    ask = files.current
    for days, count, words in (
        (0, 0, ""),
        (2, 1, "expires in 29.0 days"),
        (0.5, 1, ""),
        (1, 2, "27.5"),
        (28, 3, "has"),
    ):
        now += days * 86400
        ask()
        ask()
        assert len(caplog.records) == count
        assert words in caplog.text


def test_a_certificate_is_renewed_halfway_through_its_life_whenever_its_owner_attaches(site: Authority) -> None:
    now = 0.0
    key = ServerKey("musterd/n1", now=lambda: now)
    assert not key.certified_by
    key.use(site.issue(key.public_key, [certificate_name("musterd/n1")]))
    now = RENEW_AFTER_S
    assert (key.certified_by, key.renewal_due) == (site.identifier, False)
    now += 1
    assert (key.certified_by, key.renewal_due) == (b"", True)


def test_a_certificate_that_names_no_authority_is_asked_for_again() -> None:
    assert authority.issuer_of(b"none") == b""
    assert authority.issuer_of(authority.self_signed(authority.make_key(), "")) == b""


def test_a_key_of_a_server_proves_nothing_before_it_has_a_certificate(site: Authority) -> None:
    key = ServerKey("musterd/n1")
    issued = site.issue(key.public_key, [certificate_name("musterd/n1")])
    assert authority.names_in_certificate(issued) == {certificate_name("musterd/n1")}


# -- shards between agents -------------------------------------------------------------------------------------------

OFFER = peer_pb2.ShardOffer(gang_id="g1", node="n1", rank=3)


class Shards(NoShards):
    """A node with one shard, and no other part of the service."""

    async def Offer(self, request: peer_pb2.ShardOffer, context: Any) -> peer_pb2.ShardStored:
        return peer_pb2.ShardStored(refused="full")

    async def Fetch(self, request: peer_pb2.FetchRequest, context: Any) -> AsyncIterator[peer_pb2.ShardOffer]:
        yield OFFER


async def test_a_new_authority_breaks_no_call_and_is_asked_for_by_new_ones(
    credentials: SecretCredentials, site: Authority
) -> None:
    """An administrator has removed the issuing authority: agents attach again and get certificates of a new one."""
    name, other = certificate_name(call_binding.name_of_agent("g1", "n1")), Authority.create("other")
    identity, key = AgentIdentity("g1", "n1", "i", os.getuid()), ServerKey("musterd/n1")
    key.use(site.issue(key.public_key, [name]))
    service = PeerService(identity, Shards(), lambda: None)
    server = make_agent_server(credentials, agent_limits(members=2), identity, service)
    address = f"{LOOPBACK}:{bind(server, f'{LOOPBACK}:0', key.certificates())}"
    await server.start()
    channels = PeerChannels(credentials, "g1", plain_text=False)
    channels.use_authorities(site.pem)
    ping = peer_pb2.LinkPing(gang_id="g1", node="n2", seq=1)
    link = await channels.open_link("n1", address, ping)
    await link.write(ping)
    assert (await link.read()).seq == 1
    key.use(other.issue(key.public_key, [name]))
    channels.use_authorities(other.pem)
    await link.write(peer_pb2.LinkPing(gang_id="g1", node="n2", seq=2))
    assert (await link.read()).seq == 2
    assert (await channels.stub_for("n1", address).Offer(OFFER)).refused == "full"
    link.cancel()
    await channels.close()
    await server.stop(None)


async def test_a_caller_who_comes_before_the_certificate_is_no_error_in_the_log(
    credentials: SecretCredentials, site: Authority, capfd: pytest.CaptureFixture[str]
) -> None:
    key = ServerKey("musterd/n1")
    async with serving(credentials, key.certificates()) as port:
        assert await ping(port, credentials, trust_in(site), server="musterd/n1") != "OK"
    assert "No match found for server name" not in capfd.readouterr().err


async def test_handshakes_at_the_same_time_end_no_server(credentials: SecretCredentials, site: Authority) -> None:
    """gRPC frees a replaced certificate while other handshakes read it. So it must be given each certificate once."""
    key = ServerKey("musterd/n1")
    key.use(site.issue(key.public_key, [LOOPBACK]))
    async with serving(credentials, key.certificates()) as port:
        for _ in range(3):
            asked = (ping(port, credentials, trust_in(site)) for _ in range(40))
            assert set(await asyncio.gather(*asked)) == {"OK"}
