"""A look at shared storage before a job is queued: in a thread, because storage may hang, and with a deadline.

The thread that hangs is left behind: the end of `muster submit` does not wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from muster.daemon.host.worker_threads import run_in_own_thread
from muster.launcher.errors import Unavailable

T = TypeVar("T")

LOOK_S = 30.0
"""Seconds for one look. A metadata server that is busy answers within some seconds."""


class Look(Protocol):
    """How storage is looked at."""

    async def __call__(self, place: str, call: Callable[[], T]) -> T:
        """What `call` finds at `place`. Raises as `look`."""


async def look(place: str, call: Callable[[], T], deadline_s: float = LOOK_S) -> T:
    """What `call` finds, which may block. `place`: what is looked at, in words.

    Raises:
        Exception: `call` has raised it.
        Unavailable: the storage does not answer.
    """
    looking = asyncio.ensure_future(run_in_own_thread(call, "storage"))
    done, _ = await asyncio.wait([looking], timeout=deadline_s)
    if done:
        return looking.result()
    looking.cancel()
    raise Unavailable(
        f"{place} can't be looked at: its storage has not answered for {deadline_s:g} s",
        "look at it on this host, for example with ls. Nothing was queued",
    )
