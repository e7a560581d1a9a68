"""Credentials made with a secret file, and the caller as a handler sees it."""

import os
from pathlib import Path

import pytest

from muster.daemon.transport.identity import (
    CredentialRefused,
    IdentityError,
    IdentityUnavailable,
    SecretCredentials,
    current_caller,
)

PAYLOAD = "/muster.v1.Muster/List mgmt1 abc"


class Clock:
    """A clock that stands where it is put."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    SecretCredentials.create(tmp_path / "secret")
    return tmp_path / "secret"


def test_a_credential_proves_the_files_owner(path: Path) -> None:
    token = SecretCredentials(path).issue(PAYLOAD)
    assert SecretCredentials(path).check(token) == (os.getuid(), os.getgid(), PAYLOAD)


def test_the_secret_is_not_in_the_credential(path: Path) -> None:
    assert path.read_bytes().hex() not in SecretCredentials(path).issue(PAYLOAD)


def test_a_payload_can_not_be_changed(path: Path) -> None:
    credentials = SecretCredentials(path)
    made, other = credentials.issue(PAYLOAD).split("."), credentials.issue(PAYLOAD.replace("mgmt1", "mgmt2")).split(".")
    with pytest.raises(CredentialRefused, match="not made with this secret"):
        credentials.check(".".join([*made[:2], other[2], made[3]]))


def test_a_credential_is_used_up(path: Path) -> None:
    credentials = SecretCredentials(path)
    token = credentials.issue(PAYLOAD)
    credentials.check(token)
    with pytest.raises(CredentialRefused, match="has been used before"):
        credentials.check(token)


@pytest.mark.parametrize("drift", [61.0, -61.0])
def test_a_credential_expires(path: Path, drift: float) -> None:
    clock = Clock()
    credentials = SecretCredentials(path, clock)
    token = credentials.issue(PAYLOAD)
    clock.now += drift
    with pytest.raises(CredentialRefused, match=f"has expired. It is {drift:.0f} s old, and may be 60 s old"):
        credentials.check(token)


def test_used_credentials_are_forgotten_no_sooner_than_they_expire(path: Path) -> None:
    clock = Clock()
    credentials = SecretCredentials(path, clock)
    first = credentials.issue(PAYLOAD)
    credentials.check(first)
    for _ in range(4):
        clock.now += 50
        credentials.check(credentials.issue(PAYLOAD))
        with pytest.raises(CredentialRefused):
            credentials.check(first)


@pytest.mark.parametrize("token", ["", ".", "x", "1.2.3", "nan.00.00", "\N{SNOWMAN}.1.2"])
def test_nonsense_is_refused(path: Path, token: str) -> None:
    with pytest.raises(CredentialRefused):
        SecretCredentials(path).check(token)


def test_another_secret_proves_nothing(path: Path, tmp_path: Path) -> None:
    other = SecretCredentials.create(tmp_path / "other")
    with pytest.raises(CredentialRefused):
        SecretCredentials(path).check(other.issue(PAYLOAD))


def test_a_secret_is_written_once_and_closed_to_others(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        SecretCredentials.create(path)


@pytest.mark.parametrize(
    ("mode", "content", "words"), [(0o644, b"x" * 32, "open to other users"), (0o600, b"x", "holds no secret")]
)
def test_a_secret_that_is_none_is_refused(tmp_path: Path, mode: int, content: bytes, words: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(IdentityUnavailable, match=words):
        SecretCredentials(path)


def test_a_missing_secret_is_told(tmp_path: Path) -> None:
    with pytest.raises(IdentityUnavailable, match="can't be read"):
        SecretCredentials(tmp_path / "absent")


def test_there_is_no_caller_outside_a_handler() -> None:
    with pytest.raises(IdentityError, match="no call with a checked credential"):
        current_caller()
