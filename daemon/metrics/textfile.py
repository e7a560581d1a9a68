"""Metrics in a file, for node_exporter's textfile collector: nothing listens."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from tempfile import NamedTemporaryFile

from prometheus_client import CollectorRegistry, generate_latest

from muster.daemon.host.lasting_problem import LastingProblem

INTERVAL_S = 15.0
_log = logging.getLogger(__name__)


async def keep_written(path: Path, registry: CollectorRegistry, interval_s: float = INTERVAL_S) -> None:
    """Write the metrics of `registry` into `path` again and again. A reader finds the old file or the new one, whole.

    A folder that can't be written is named in the log, and tried again.
    """
    problem = LastingProblem(_log, f"metrics are written to {path} again")
    while True:
        try:
            await asyncio.to_thread(write, path, registry)
        except OSError as error:
            problem.meet(f"metrics can't be written to {path}: {error.strerror}")
        else:
            problem.end()
        await asyncio.sleep(interval_s)


def write(path: Path, registry: CollectorRegistry) -> None:
    """Replace the file. Whoever may list its folder may read it, whatever the umask: node_exporter is another user.

    Raises:
        OSError: it can't be written.
    """
    content, mode = generate_latest(registry), 0o600 | (path.parent.stat().st_mode & 0o044)
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.rename(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise
