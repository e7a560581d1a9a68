"""A munged of its own for a measurement, with its own key and socket."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MUNGED = shutil.which("munged", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
"""None: munge is not installed here."""


@contextmanager
def private_munged(folder: Path) -> Iterator[tuple[Path, int]]:
    """Run a munged. Yields its socket and its process id."""
    assert MUNGED
    folder.mkdir(mode=0o755)
    key = folder / "key"
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o400)
    places = [f"--{what}-file={folder / what}" for what in ("key", "log", "seed", "pid")]
    process = subprocess.Popen(
        [MUNGED, "--foreground", "--force", f"--socket={folder / 'socket'}", *places],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield folder / "socket", process.pid
    finally:
        process.kill()
        process.wait()
