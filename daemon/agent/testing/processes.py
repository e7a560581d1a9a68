"""Whether processes have ended, for tests of agents."""

import asyncio
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(*pids: int) -> None:
    """Wait until all of these processes have ended.

    Raises:
        TimeoutError: they have not within two minutes.
    """
    async with asyncio.timeout(120):
        while any(alive(pid) for pid in pids):  # noqa: ASYNC110 - strangers' ends are told to nobody
            await asyncio.sleep(0.01)
