"""`make dist`: the wheel of a commit, built so that another build of the commit gives the same bytes.

The sources come from `git archive`, so uncommitted files have no part in the wheel. The commit's own time is the time
of every file. The build uses the locked setuptools of release/tools.lock, without a network.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 300
"""A build takes 5 s."""


def main(into: Path, root: Path = ROOT, commit: str = "HEAD") -> Path:
    """Build the wheel of `commit` of the repository at `root` into the folder `into`, and return its path."""
    epoch = _run(["git", "-C", str(root), "log", "-1", "--format=%ct", commit]).strip()
    with tempfile.TemporaryDirectory() as folder:
        _unpack(root, commit, Path(folder))
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(into), folder]
        _run(command, {"SOURCE_DATE_EPOCH": epoch})
    (wheel,) = into.glob("muster-*.whl")
    return wheel


def _unpack(root: Path, commit: str, folder: Path) -> None:
    """Write the files of the commit, with fixed modes: the wheel keeps modes."""
    archive = folder.with_suffix(".tar")
    _run(["git", "-C", str(root), "-c", "tar.umask=0022", "archive", "--output", str(archive), commit])
    try:
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="fully_trusted")
    finally:
        archive.unlink()


def _run(command: list[str], environment: dict[str, str] | None = None) -> str:
    whole = {**os.environ, **(environment or {})}
    # The build copies the files under its umask.
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=whole, umask=0o022)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
