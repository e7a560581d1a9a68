"""Error counters of the GPUs before and after a check, for the vendor's ticket.

musterd reads them all the time. Whoever runs a check asks it over its socket, so the check needs neither rights nor
NVIDIA's library. Without musterd, or without GPUs, nothing is noted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from muster.daemon.host import kept_memory_client

Counters = Mapping[str, Mapping[str, int]]
"""Device → counter → its value since the driver started."""
ASK_TIMEOUT_S = 1.0
"""Seconds for one answer of musterd. It takes milliseconds."""
FRESH_WITHIN_S = 5.0
"""Seconds to wait for a reading that is newer than the check: musterd reads these counters every 3 s."""
_POLL_S = 0.25
_MOST_CHARS = 400


async def read(socket: str, after: float | None = None) -> Counters:
    """The counters. `after`: monotonic seconds; wait for a reading that is newer, if there are GPUs."""
    end = time.monotonic() + FRESH_WITHIN_S
    while True:
        counters, read_at = await asyncio.to_thread(_ask, socket)
        if after is None or not counters or read_at >= after or time.monotonic() >= end:
            return counters
        await asyncio.sleep(_POLL_S)


def _ask(socket: str) -> tuple[Counters, float]:
    """The counters, and when the oldest of them was read (monotonic seconds)."""
    try:
        answer, _ = kept_memory_client.send_request(socket, {"ask_counters": {}}, timeout_s=ASK_TIMEOUT_S)
        found = answer.get("counters", {})
        gpus = {
            str(gpu["device"]): {name: int(value) for name, value in gpu["values"].items()}
            for gpu in found.get("gpus", ())
        }
        return gpus, time.monotonic() - float(found.get("age_s", 0.0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no musterd, or one of another version
        return {}, 0.0


def describe(before: Counters, after: Counters) -> str:
    """Both readings in one line, what has grown first; empty without GPUs."""
    if not after:
        return ""
    changes = [
        (device, name, before.get(device, {}).get(name), value)
        for device, values in sorted(after.items())
        for name, value in sorted(values.items())
    ]
    shown = sorted((change for change in changes if change[3] or change[2]), key=lambda change: change[2] == change[3])
    words = "; ".join(_words(*change) for change in shown) or "all 0 before and after"
    line = f"{len(after)} GPU{'s' if len(after) > 1 else ''}: {words}"
    return line if len(line) <= _MOST_CHARS else f"{line[: _MOST_CHARS - 3]}..."


def _words(device: str, name: str, before: int | None, after: int) -> str:
    if before == after:
        return f"{device} {name} {after}"
    return f"{device} {name} {'unknown' if before is None else before} before, {after} after"
