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

METHOD = "/muster.v1.Muster/List"


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
    token = SecretCredentials(path).issue(METHOD)
    assert SecretCredentials(path).check(token, METHOD) == (os.getuid(), os.getgid())


def test_the_secret_is_not_in_the_credential(path: Path) -> None:
    assert path.read_bytes().hex() not in SecretCredentials(path).issue(METHOD)


def test_a_credential_is_for_one_method(path: Path) -> None:
    credentials = SecretCredentials(path)
    with pytest.raises(CredentialRefused, match=r"not made with this secret for /muster\.v1\.Muster/Cancel"):
        credentials.check(credentials.issue(METHOD), "/muster.v1.Muster/Cancel")


def test_a_credential_is_used_up(path: Path) -> None:
    credentials = SecretCredentials(path)
    token = credentials.issue(METHOD)
    credentials.check(token, METHOD)
    with pytest.raises(CredentialRefused, match="has been used before"):
        credentials.check(token, METHOD)


@pytest.mark.parametrize("drift", [301.0, -301.0])
def test_a_credential_expires(path: Path, drift: float) -> None:
    clock = Clock()
    credentials = SecretCredentials(path, clock)
    token = credentials.issue(METHOD)
    clock.now += drift
    with pytest.raises(CredentialRefused, match="has expired"):
        credentials.check(token, METHOD)


def test_used_credentials_are_forgotten_no_sooner_than_they_expire(path: Path) -> None:
    clock = Clock()
    credentials = SecretCredentials(path, clock)
    first = credentials.issue(METHOD)
    credentials.check(first, METHOD)
    for _ in range(4):
        clock.now += 290
        credentials.check(credentials.issue(METHOD), METHOD)
        with pytest.raises(CredentialRefused):
            credentials.check(first, METHOD)


@pytest.mark.parametrize("token", ["", ".", "x", "1.2.3", "nan.00.00", "\N{SNOWMAN}.1.2"])
def test_nonsense_is_refused(path: Path, token: str) -> None:
    with pytest.raises(CredentialRefused):
        SecretCredentials(path).check(token, METHOD)


def test_another_secret_proves_nothing(path: Path, tmp_path: Path) -> None:
    other = SecretCredentials.create(tmp_path / "other")
    with pytest.raises(CredentialRefused):
        SecretCredentials(path).check(other.issue(METHOD), METHOD)


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
