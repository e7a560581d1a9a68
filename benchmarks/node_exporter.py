"""Prometheus' node exporter, the peer of `benchmarks.bench_daemon`: a daemon that every node of many sites runs.

It is taken from PATH, else from Debian's package, which is unpacked below build/ and not installed.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "prometheus-node-exporter"
UNPACKED = Path(__file__).resolve().parents[1] / "build" / "node-exporter"
DOWNLOAD_TIMEOUT_S = 60.0
SCRAPE_S = 1.0
"""Seconds between two scrapes: as often as musterd reads its sensors."""
READY_S = 20.0


class NoExporterError(Exception):
    """There is no node exporter here. The message says why."""


def program() -> str:
    """The path of the program.

    Raises:
        NoExporterError: it is not installed, and the package can't be had.
    """
    for name in (PACKAGE, "node_exporter"):
        if found := shutil.which(name):
            return found
    unpacked = UNPACKED / "usr" / "bin" / PACKAGE
    if not unpacked.exists():
        _unpack()
    return str(unpacked)


def _unpack() -> None:
    if not shutil.which("apt-get"):
        raise NoExporterError(f"{PACKAGE} is not installed, and this is no Debian")
    UNPACKED.mkdir(parents=True, exist_ok=True)
    for command in (f"apt-get download {PACKAGE}", f"dpkg -x {PACKAGE}_*.deb ."):
        try:
            done = subprocess.run(
                ["sh", "-c", command], cwd=UNPACKED, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise NoExporterError(f"{command} did not end within {DOWNLOAD_TIMEOUT_S:g} s") from None
        if done.returncode:
            raise NoExporterError(f"{command} failed: {done.stderr.strip().splitlines()[-1:]}")


@dataclass
class Exporter:
    """A running exporter. `scrapes`: how many were answered."""

    pid: int
    scrapes: int = 0


@asynccontextmanager
async def scraped_exporter(port: int) -> AsyncIterator[Exporter]:
    """Run the exporter at a port of the loopback address, and scrape it once a second.

    Raises:
        NoExporterError: see `program`.
    """
    command = (program(), f"--web.listen-address=127.0.0.1:{port}")
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    exporter = Exporter(process.pid)
    scraping = asyncio.create_task(_scrape(f"http://127.0.0.1:{port}/metrics", exporter))
    try:
        async with asyncio.timeout(READY_S):
            while not exporter.scrapes:  # noqa: ASYNC110  # another process sets no event of this one
                await asyncio.sleep(0.1)
        yield exporter
    finally:
        scraping.cancel()
        process.kill()
        await process.wait()


async def _scrape(url: str, exporter: Exporter) -> None:
    while True:
        try:
            await asyncio.to_thread(_get, url)
            exporter.scrapes += 1
        except OSError:
            pass  # not yet there
        await asyncio.sleep(SCRAPE_S)


def _get(url: str) -> None:
    with urllib.request.urlopen(url, timeout=10) as answer:  # loopback
        answer.read()
