"""`muster pki`: what it writes, and that it writes all of it or nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from muster.daemon.transport import authority
from muster.daemon.transport.site_config import PLAIN_TEXT, Site, SiteError
from muster.daemon.transport.tls import CertificateFiles
from muster.launcher.main import main


def _init(folder: Path, *hosts: str) -> int:
    return main(["pki", "init", str(folder), *hosts])


def test_the_certificates_of_a_site_are_what_the_daemons_read(tmp_path: Path) -> None:
    assert _init(tmp_path / "pki", "mgmt1,mgmt1.example,10.0.0.1", "mgmt2") == 0
    files = CertificateFiles(tmp_path / "pki/mgmt1/coordinator.pem", tmp_path / "pki/mgmt1/coordinator.key")
    assert files.names == {"mgmt1", "mgmt1.example", "10.0.0.1"}
    config = tmp_path / "muster.toml"
    config.write_text(f'coordinator = "mgmt1:7070"\ntls_authority = "{tmp_path}/pki/authority.pem"\n')
    assert Site.load(config=config, environ={}).trust()


def test_keys_are_private(tmp_path: Path) -> None:
    assert _init(tmp_path / "pki", "mgmt1") == 0
    assert (tmp_path / "pki").stat().st_mode & 0o777 == 0o700
    for key in (tmp_path / "pki").rglob("*.key"):
        assert key.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_only_their_owner_changes_certificates_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert _init(tmp_path / "pki", "mgmt1") == 0
    finally:
        os.umask(before)
    for file in ("authority.pem", "mgmt1/coordinator.pem"):
        assert (tmp_path / "pki" / file).stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    "name", ["two words", "mgmt1:7070", "..", "m\u00fcnchen", "*.site", "", "a/b", "-x", "x" * 300, "10.0.0.300"]
)
def test_nothing_is_made_for_what_is_no_host(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    for host in (name, f"mgmt2,{name}"):
        assert main(["pki", "init", str(tmp_path / "pki"), "mgmt1", "--", host]) == 64
        assert [*tmp_path.iterdir()] == []
        assert f"{host!r} must be HOST[,NAME...], without a port" in capsys.readouterr().err


def test_an_authority_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _init(tmp_path / "pki", "mgmt1") == 0
    before = (tmp_path / "pki/authority.pem").read_bytes()
    assert _init(tmp_path / "pki", "mgmt1") == 64
    assert (tmp_path / "pki/authority.pem").read_bytes() == before
    assert "exists" in capsys.readouterr().err


def test_a_renewed_certificate_has_the_same_authority(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _init(tmp_path / "pki", "mgmt1") == 0
    certificate = tmp_path / "pki/mgmt1/coordinator.pem"
    before = certificate.read_bytes()
    assert main(["pki", "renew", str(tmp_path / "pki"), "mgmt1,mgmt1.example", "--days", "30"]) == 0
    assert certificate.read_bytes() != before
    capsys.readouterr()
    assert main(["pki", "show", str(certificate)]) == 0
    assert capsys.readouterr().out == f"{certificate}: mgmt1, mgmt1.example; expires in 30 days\n"
    assert main(["pki", "renew", str(tmp_path / "none"), "mgmt1"]) == 64


def test_an_expired_certificate_is_shown_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    issuing = authority.Authority.create("site")
    path = tmp_path / "c.pem"
    path.write_bytes(issuing.issue(authority.bytes_of_public_key(authority.make_key()), ["mgmt1"], -0.5))
    assert main(["pki", "show", str(path)]) == 0
    assert "mgmt1; expired" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("auth", "connections", "coordinator", "plain"),
    [
        ("munge", "tls", "mgmt1:7070", False),
        ("munge", PLAIN_TEXT, "mgmt1:7070", True),
        ("munge", "tls", "127.0.0.1:7070", False),
        ("secret:/s", "tls", "127.0.0.1:7070", True),
        ("secret:/s", "tls", "[::1]:7070,localhost:7071", True),
        ("secret:/s", "tls", "127.0.0.1:7070,mgmt1:7070", False),
    ],
)
def test_plain_text_is_for_one_machine_or_said_in_words(
    auth: str, connections: str, coordinator: str, plain: bool
) -> None:
    assert Site(auth=auth, connections=connections, coordinator=coordinator).is_plain_text is plain


def test_missing_certificates_are_one_clear_error(tmp_path: Path) -> None:
    site = Site(coordinator="mgmt1:7070", tls_authority=tmp_path / "a", tls_certificate=tmp_path / "c")
    for load in (site.trust, site.certificate_files):
        with pytest.raises(
            SiteError, match=r"can't be read: No such file or directory.*muster pki init.*plain text, the"
        ):
            load()
