"""A small certificate authority: it issues the certificates of Muster's servers. ECDSA with P-256.

There are two of them. `muster pki init` makes one for a site that has no authority: it issues the coordinators'
certificates. Each coordinator keeps another in its state folder (`issuing_authority`): it issues the certificates of
node daemons and agents, when they attach.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, PublicKeyAlgorithmOID

from muster.daemon.host import clock, private_file
from muster.daemon.host.addresses import comparable_host
from muster.daemon.transport.tls import AUTHORITY_DAYS, ISSUED_DAYS, TlsError

Key = ec.EllipticCurvePrivateKey

CLOCKS_DIFFER = datetime.timedelta(days=1)
"""A certificate is valid from this time before it was made: the clocks of two hosts may differ."""
_MAX_COMMON_NAME = 64
MIN_RSA_BITS = 2048
"""The shortest RSA key of a server. Shorter ones count as broken (NIST SP 800-131A)."""
RIGHT_KEYS = f"ECDSA with P-256 (secp256r1) or P-384 (secp384r1), or RSA with {MIN_RSA_BITS} bits or more"
_CURVES = (ec.SECP256R1, ec.SECP384R1)
_OPEN_TO_OTHERS = 0o027
"""Bits of the mode of a key's file. A site may have a group that reads keys, and no group that writes them."""


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate of an authority, and its key."""

    certificate: x509.Certificate
    key: Key

    @classmethod
    def create(cls, name: str) -> Authority:
        """A new authority."""
        key = make_key()
        subject = _name(name)
        limited = x509.BasicConstraints(ca=True, path_length=0)
        builder = _builder(subject, subject, key.public_key(), AUTHORITY_DAYS).add_extension(limited, critical=True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = builder.add_extension(_USAGE_OF_AUTHORITY, critical=True).add_extension(identifier, critical=False)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, certificate: Path, key: Path) -> Authority:
        """Raises TlsError: the files can't be read, or are no authority."""
        certificate_pem, key_pem = read_certificate_files(certificate, key)
        return cls(x509.load_pem_x509_certificate(certificate_pem), _load_key(key_pem))

    @property
    def pem(self) -> bytes:
        """The certificate."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def identifier(self) -> bytes:
        """The subject key identifier, as `issuer_of` finds it in what this authority issued."""
        return x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()).digest

    def issue(self, public_key: bytes, names: Iterable[str], days: float = ISSUED_DAYS) -> bytes:
        """A certificate (PEM) that proves these names to clients.

        Args:
            public_key: of the server (DER, SubjectPublicKeyInfo).
            names: DNS names and IP addresses.
            days: how long it is valid.

        Raises:
            TlsError: `public_key` is no key of P-256.
        """
        listed = list(names)
        builder = _builder(_name(listed[0]), self.certificate.subject, _public_key(public_key), days)
        alternatives = x509.SubjectAlternativeName([_general_name(name) for name in listed])
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(alternatives, critical=False)
        builder = builder.add_extension(_USAGE_OF_SERVER, critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        signed = builder.add_extension(issuer, critical=False).sign(self.key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM)


def issuing_authority(folder: Path) -> Authority:
    """The authority that a coordinator keeps in its state folder. It is made at the first start.

    Raises:
        TlsError: the files are there and can't be used.
        OSError: the files can't be written.
    """
    certificate, key = folder / "issuing-authority.pem", folder / "issuing-authority.key"
    if not certificate.exists():
        made = Authority.create("Muster: node daemons and agents")
        # The certificate comes last: it says that both are there.
        private_file.replace(key, pem_of_key(made.key).decode())
        private_file.replace(certificate, made.pem.decode())
    return Authority.load(certificate, key)


def make_key() -> Key:
    """A new key."""
    return ec.generate_private_key(ec.SECP256R1())


def pem_of_key(key: Key) -> bytes:
    """The key as PEM, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def bytes_of_public_key(key: Key) -> bytes:
    """The public half of the key as DER, SubjectPublicKeyInfo."""
    return key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def self_signed(key: Key, name: str) -> bytes:
    """A certificate (PEM) that proves nothing to anybody. `name`: the DNS name that it claims; empty: none."""
    subject = _name("not attached yet")
    builder = _builder(subject, subject, key.public_key(), 1)
    if name:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def read_certificate_files(certificate: Path, key: Path) -> tuple[bytes, bytes]:
    """Certificate and key as they are in their files (PEM). Further certificates may follow the first.

    Raises:
        TlsError: a file can't be read, holds something else, the key belongs to another certificate, is of a kind that
            no server may have, or others can read it.
    """
    certificate_pem, (key_pem, mode) = read_certificate(certificate), _read_with_mode(key)
    public_key = _check_kind(certificate, x509.load_pem_x509_certificate(certificate_pem))
    try:
        own = serialization.load_pem_private_key(key_pem, None).public_key()
    except (ValueError, TypeError):
        raise TlsError(f"{key} holds no key (PEM, without a password)") from None
    if own != public_key:
        raise TlsError(f"{key} is not the key of {certificate}")
    if mode & _OPEN_TO_OTHERS:
        raise TlsError(f"{key} has mode {mode:04o}: others can use it. Set 0600, or 0640 for a group that reads keys")
    return certificate_pem, key_pem


def _check_kind(path: Path, certificate: x509.Certificate) -> CertificatePublicKeyTypes:
    """The public key. gRPC's TLS serves no Ed25519 and no P-521, and takes RSA of 1024 bits without a word (tried).

    Raises:
        TlsError: a server with such a key could not serve, or its key is weak.
    """
    if certificate.public_key_algorithm_oid == PublicKeyAlgorithmOID.RSASSA_PSS:
        found = "RSA for PSS only"
    else:
        try:
            key = certificate.public_key()
        except (ValueError, UnsupportedAlgorithm):
            found = "of an unknown kind"
        else:
            if _is_servable(key):
                return key
            found = _kind_of(key)
    raise TlsError(f"{path}: its key is {found}. It must be {RIGHT_KEYS}")


def _is_servable(key: CertificatePublicKeyTypes) -> bool:
    if isinstance(key, rsa.RSAPublicKey):
        return key.key_size >= MIN_RSA_BITS
    return isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, _CURVES)


def _kind_of(key: CertificatePublicKeyTypes) -> str:
    """What a person calls such a key, for example "RSA with 1024 bits"."""
    if isinstance(key, ec.EllipticCurvePublicKey):
        return f"ECDSA with {key.curve.name}"
    kind = type(key).__name__.removesuffix("PublicKey")
    return f"{kind} with {key.key_size} bits" if isinstance(key, rsa.RSAPublicKey | dsa.DSAPublicKey) else kind


def read_certificate(path: Path) -> bytes:
    """The certificate in a file (PEM). Raises TlsError: the file can't be read, or holds something else."""
    pem = _read(path)
    try:
        x509.load_pem_x509_certificate(pem)
    except ValueError:
        raise TlsError(f"{path} holds no certificate (PEM)") from None
    return pem


def names_in_certificate(certificate: bytes) -> frozenset[str]:
    """The DNS names and IP addresses that a certificate (PEM) proves, in the form of `comparable_host`."""
    found = x509.load_pem_x509_certificate(certificate)
    try:
        alternatives = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    addresses = alternatives.get_values_for_type(x509.IPAddress)
    return frozenset(map(comparable_host, (*alternatives.get_values_for_type(x509.DNSName), *map(str, addresses))))


def expires_at(certificate: bytes) -> float:
    """When a certificate (PEM) expires, in seconds since the epoch."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()


def issuer_of(certificate: bytes) -> bytes:
    """The subject key identifier of the authority that issued a certificate (PEM); empty: it names none."""
    try:
        extensions = x509.load_pem_x509_certificate(certificate).extensions
        return extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier or b""
    except (ValueError, x509.ExtensionNotFound):
        return b""


def _read(path: Path) -> bytes:
    return _read_with_mode(path)[0]


def _read_with_mode(path: Path) -> tuple[bytes, int]:
    try:
        with path.open("rb") as file:
            return file.read(), os.fstat(file.fileno()).st_mode & 0o777
    except OSError as error:
        raise TlsError(f"{path} can't be read: {error.strerror}") from None


def _load_key(pem: bytes) -> Key:
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TlsError("the key of Muster's authority must be an ECDSA key")
    return key


def _public_key(der: bytes) -> ec.EllipticCurvePublicKey:
    try:
        key = serialization.load_der_public_key(der)
    except ValueError:
        raise TlsError("this is no public key (DER)") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise TlsError("the public key must be an ECDSA key with P-256")
    return key


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.fromtimestamp(clock.wall(), datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:_MAX_COMMON_NAME])])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


_USAGE_OF_SERVER = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
_USAGE_OF_AUTHORITY = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)
