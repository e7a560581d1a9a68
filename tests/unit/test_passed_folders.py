"""A folder that a user may pass and not read, as /home of many sites (mode 0711), hides nothing of their own in it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

USER = 65534
AS_USER = """
import os, sys
from muster.checkpoint.durable.trusted_folder import TrustedFolder
from muster.checkpoint.format.errors import UntrustedCheckpoint
from muster.daemon.host import rank_log_files
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
what, path = sys.argv[1:]
if what == "checkpoint":
    try:
        with TrustedFolder(path) as trusted:
            trusted.check_file("data")
            print((trusted.path / "data").read_text())
    except UntrustedCheckpoint as error:
        print(error)
else:
    os.write(rank_log_files.open_log(path, "g", 1, 0), b"a line")
    print(rank_log_files.log_tail(path, "g", 1, 0))
"""


def as_user(what: str, path: Path) -> str:
    """What a process of `USER` finds there."""
    command = [sys.executable, "-c", AS_USER, what, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def passed() -> Iterator[Path]:
    """Root's folder. Its users may only pass it, and all above it."""
    with tempfile.TemporaryDirectory(prefix="passed-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


def of_user(*paths: Path) -> None:
    for path in paths:
        os.lchown(path, USER, USER)


@pytest.fixture
def checkpoint(passed: Path) -> Path:
    folder = passed / "step_00000001_g1_g"
    folder.mkdir()
    (folder / "data").write_text("of the user")
    of_user(folder, folder / "data")
    return folder


def test_a_checkpoint_is_read(checkpoint: Path) -> None:
    assert as_user("checkpoint", checkpoint) == "of the user"


def test_the_link_of_root_there_is_followed_and_another_ones_is_not(checkpoint: Path) -> None:
    links = checkpoint.parent / "links"
    links.mkdir()
    (links / "newest").symlink_to(checkpoint)
    links.chmod(0o711)
    assert as_user("checkpoint", links / "newest") == "of the user"
    links.chmod(0o1733)
    assert "it is a link, which others may have laid" in as_user("checkpoint", links / "newest")


def test_logs_are_written_and_read(passed: Path) -> None:
    run_dir = passed / "run"
    run_dir.mkdir()
    run_dir.chmod(0o1733)
    assert as_user("log", run_dir) == "a line"
