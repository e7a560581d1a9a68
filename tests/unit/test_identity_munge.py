"""Real munge: a munged of our own, with its own key and socket. Without munge here, the cluster's tests have it."""

import os
import secrets
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.daemon.transport.identity import CredentialRefused, IdentityUnavailable, MungeCredentials

PAYLOAD = "/muster.v1.Muster/List mgmt1 abc"
MUNGED = shutil.which("munged", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

pytestmark = pytest.mark.skipif(MUNGED is None, reason="munge is not installed here; the cluster's tests use it")


class Munged:
    """A private munged. It is ready when its first process has ended (that is how it becomes a daemon)."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o755)
        self.socket, self._pid = folder / "socket", folder / "pid"
        key = folder / "key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        places = [f"--{what}-file={folder / what}" for what in ("key", "pid", "log", "seed")]
        assert MUNGED
        subprocess.run(
            [MUNGED, "--force", f"--socket={self.socket}", *places], check=True, capture_output=True, timeout=60
        )

    def stop(self) -> None:
        """End it; doing so twice is fine."""
        if self._pid.exists():
            pid = int(self._pid.read_text())
            end = os.pidfd_open(pid)
            os.kill(pid, signal.SIGTERM)
            while not select.select([end], [], [], 0.05)[0]:
                os.kill(pid, signal.SIGTERM)  # munged loses a signal that comes just before it waits for a caller
            os.close(end)


@pytest.fixture
def munged(tmp_path: Path) -> Iterator[Munged]:
    daemon = Munged(tmp_path / "munge")
    yield daemon
    daemon.stop()


def test_a_credential_proves_who_made_it(munged: Munged) -> None:
    credentials = MungeCredentials(munged.socket)
    token = credentials.issue(PAYLOAD)
    assert token.isascii()
    assert len(token.split()) == 1
    assert credentials.check(token) == (os.getuid(), os.getgid(), PAYLOAD)


def test_munge_refuses_a_replay(munged: Munged) -> None:
    credentials = MungeCredentials(munged.socket)
    token = credentials.issue(PAYLOAD)
    credentials.check(token)
    with pytest.raises(CredentialRefused, match="has been used before"):
        credentials.check(token)


@pytest.mark.parametrize("token", ["", "MUNGE:", "MUNGE:AwQFAAA=:", "nonsense", "\N{SNOWMAN}"])
def test_nonsense_is_refused(munged: Munged, token: str) -> None:
    with pytest.raises(CredentialRefused):
        MungeCredentials(munged.socket).check(token)


def test_another_key_proves_nothing(munged: Munged, tmp_path: Path) -> None:
    other = Munged(tmp_path / "other")
    try:
        token = MungeCredentials(other.socket).issue(PAYLOAD)
    finally:
        other.stop()
    with pytest.raises(CredentialRefused, match="not made with this cluster's munge key"):
        MungeCredentials(munged.socket).check(token)


def test_without_munged_nothing_can_be_made_or_checked(munged: Munged) -> None:
    credentials = MungeCredentials(munged.socket)
    token = credentials.issue(PAYLOAD)
    munged.stop()
    with pytest.raises(IdentityUnavailable, match="is munged running"):
        credentials.issue(PAYLOAD)
    with pytest.raises(IdentityUnavailable, match="is munged running"):
        credentials.check(token)


def test_a_credential_can_be_made_by_hand(munged: Munged) -> None:
    munge = shutil.which("munge")
    assert munge
    made = subprocess.run([munge, "-S", munged.socket, "-n", "-s", PAYLOAD], check=True, capture_output=True, text=True)
    assert MungeCredentials(munged.socket).check(made.stdout.strip()) == (os.getuid(), os.getgid(), PAYLOAD)
