"""Lets node daemons attach one after another, so that those that are attached already are heard meanwhile.

To attach costs much more than a heartbeat: facts for the journal, a certificate. When thousands of daemons attach at
once, many of their hellos are ready at the same turn of the event loop. A heartbeat that came after them would wait for
all of them, and its sender would take the coordinator for dead. With turns, it waits for one.
"""

from __future__ import annotations

import asyncio


class AttachTurns:
    """One hello at each turn of the event loop, in the order of their arrival."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait(self) -> None:
        """Wait for this hello's turn. What else is ready in the event loop runs before the next one."""
        async with self._lock:
            await asyncio.sleep(0)
