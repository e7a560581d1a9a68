"""Which kinds of key a coordinator's certificate may have: those that gRPC's TLS serves, and that are strong."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa
from cryptography.x509.oid import NameOID

from muster.daemon.host import clock, private_file
from muster.daemon.testing.scripted_world import DEADLINE_S
from muster.daemon.transport.authority import RIGHT_KEYS, Authority
from muster.daemon.transport.channel import ListenError, bind, make_server, open_channel
from muster.daemon.transport.identity import SecretCredentials
from muster.daemon.transport.server_limits import COORDINATOR
from muster.daemon.transport.tls import CertificateFiles, TlsError, Trust
from muster.v1 import common_pb2_grpc
from muster.v1.common_pb2 import PingReply, PingRequest

LOOPBACK = "127.0.0.1"
make_rsa = partial(rsa.generate_private_key, 65537)


@dataclass(frozen=True)
class Kind:
    """A kind of key. found: how the refusal names it; empty: it is accepted. served: gRPC's TLS can serve with it."""

    name: str
    new: Callable[[], Any]
    found: str = ""
    served: bool = False

    def __str__(self) -> str:
        return self.name

    @cache  # noqa: B019  # the kinds live as long as the module
    def make(self) -> Any:
        """A key, always the same: to find large primes costs seconds."""
        return self.new()


RSA = Kind("RSA-2048", lambda: make_rsa(2048), served=True)
KINDS = [
    Kind("P-256", lambda: ec.generate_private_key(ec.SECP256R1()), served=True),
    Kind("P-384", lambda: ec.generate_private_key(ec.SECP384R1()), served=True),
    RSA,
    Kind("RSA-1024", lambda: make_rsa(1024), "RSA with 1024 bits", served=True),
    Kind("P-224", lambda: ec.generate_private_key(ec.SECP224R1()), "ECDSA with secp224r1"),
    Kind("P-521", lambda: ec.generate_private_key(ec.SECP521R1()), "ECDSA with secp521r1"),
    Kind("Ed25519", ed25519.Ed25519PrivateKey.generate, "Ed25519"),
    Kind("Ed448", ed448.Ed448PrivateKey.generate, "Ed448"),
    Kind("DSA", lambda: dsa.generate_private_key(1024), "DSA with 1024 bits"),
]


@pytest.fixture(scope="module")
def site() -> Authority:
    return Authority.create("site")


def certificate_of(key: Any, site: Authority) -> x509.Certificate:
    """A certificate of the site for `key`, whatever its kind."""
    now = datetime.datetime.fromtimestamp(clock.wall(), datetime.UTC)
    builder = x509.CertificateBuilder(
        issuer_name=site.certificate.subject,
        subject_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, LOOPBACK)]),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - datetime.timedelta(days=1),
        not_valid_after=now + datetime.timedelta(days=1),
    )
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(LOOPBACK))])
    return builder.add_extension(names, critical=False).sign(site.key, hashes.SHA256())


def write_files(folder: Path, key: Any, certificate: x509.Certificate) -> tuple[Path, Path]:
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    private_file.replace(folder / "c.key", key.private_bytes(*form).decode())
    (folder / "c.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return folder / "c.pem", folder / "c.key"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_key_that_can_not_serve_or_is_weak_is_refused_at_the_start(
    tmp_path: Path, site: Authority, kind: Kind
) -> None:
    key = kind.make()
    paths = write_files(tmp_path, key, certificate_of(key, site))
    if not kind.found:
        assert CertificateFiles(*paths).names == {LOOPBACK}
        return
    with pytest.raises(TlsError) as refused:
        CertificateFiles(*paths)
    assert str(refused.value) == f"{paths[0]}: its key is {kind.found}. It must be {RIGHT_KEYS}"


class Probe(common_pb2_grpc.ProbeServiceServicer):
    async def Ping(self, request: PingRequest, context: Any) -> PingReply:
        return PingReply(nonce=request.nonce)


@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_what_is_accepted_is_what_grpc_serves(tmp_path: Path, site: Authority, kind: Kind) -> None:
    """The list follows gRPC's TLS. If it serves another kind one day, this test fails, and the list may grow."""
    key, credentials = kind.make(), SecretCredentials.create(tmp_path / "secret")
    certificate_path, key_path = write_files(tmp_path, key, certificate_of(key, site))
    server = make_server(credentials, COORDINATOR)
    common_pb2_grpc.add_ProbeServiceServicer_to_server(Probe(), server)
    try:
        proof = grpc.ssl_server_credentials([(key_path.read_bytes(), certificate_path.read_bytes())])
        port = bind(server, f"{LOOPBACK}:0", proof)
    except ListenError:
        assert not kind.served
        return
    await server.start()
    async with open_channel(f"{LOOPBACK}:{port}", credentials, trust=Trust(lambda: site.pem)) as channel:
        try:
            await common_pb2_grpc.ProbeServiceStub(channel).Ping(PingRequest(), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError:
            assert not kind.served
        else:
            assert kind.served
    await server.stop(None)


def test_an_rsa_key_for_another_signature_is_refused(tmp_path: Path, site: Authority) -> None:
    """A certificate may say that its RSA key is for PSS only. gRPC's TLS can't read it."""
    key = RSA.make()
    made = certificate_of(key, site).public_bytes(serialization.Encoding.DER)
    any_use, for_pss = (bytes.fromhex(f"06092a864886f70d0101{end}00") for end in ("0105", "0a30"))
    changed = x509.load_der_x509_certificate(made.replace(any_use, for_pss))
    paths = write_files(tmp_path, key, changed)
    with pytest.raises(TlsError, match=r"its key is RSA for PSS only\. It must be"):
        CertificateFiles(*paths)


def test_a_wrong_kind_of_key_replaces_no_right_one(
    tmp_path: Path, site: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    right, wrong = KINDS[0].make(), ed25519.Ed25519PrivateKey.generate()
    files = CertificateFiles(*write_files(tmp_path, right, certificate_of(right, site)))
    served = files.current()
    write_files(tmp_path, wrong, certificate_of(wrong, site))
    assert files.current() is served
    assert "its key is Ed25519. It must be" in caplog.text
    assert "the certificate that was read before is used" in caplog.text
