"""Metrics in a file, for node_exporter's textfile collector: nothing listens."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from prometheus_client import CollectorRegistry, write_to_textfile

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
            await asyncio.to_thread(write_to_textfile, str(path), registry)
        except OSError as error:
            problem.meet(f"metrics can't be written to {path}: {error.strerror}")
        else:
            problem.end()
        await asyncio.sleep(interval_s)
