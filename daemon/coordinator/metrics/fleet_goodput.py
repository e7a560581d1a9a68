"""The goodput of all jobs over the last day, week and month, for metrics.

The sum over a month reads what all jobs have used, so no scrape waits for it: a scrape starts it now and then, and
shows the last one.
"""

from __future__ import annotations

import asyncio

from muster.daemon.coordinator.accounting.gang_accounts import GangAccounts
from muster.daemon.coordinator.goodput.intervals import TRAINED, Category
from muster.daemon.coordinator.metrics.families import Families
from muster.daemon.coordinator.shell.engine import Engine

WINDOWS_S = {"1d": 86400.0, "7d": 7 * 86400.0, "30d": 30 * 86400.0}
VALID_S = 60.0
"""Seconds for which a sum is shown before it is made again."""


class FleetGoodput:
    """Sums up what all jobs have used, on the event loop of `engine`."""

    def __init__(self, engine: Engine, accounts: GangAccounts) -> None:
        self._engine, self._accounts = engine, accounts
        self._node_s: dict[str, dict[str, float]] = {}
        self._summed_at = float("-inf")
        self._summing: asyncio.Task[None] | None = None

    def add_to(self, families: Families) -> None:
        """The series of all jobs, as they were summed up last. Without allocated time there is no goodput."""
        if self._engine.clock.now() - self._summed_at > VALID_S and (self._summing is None or self._summing.done()):
            self._summing = asyncio.create_task(self._sum_up())
        for window, sums in self._node_s.items():
            lost = {one: sums.get(one, 0.0) for one in Category if one not in (Category.QUEUE, *TRAINED)}
            trained = sum(sums.get(one, 0.0) for one in TRAINED)
            if allocated := trained + sum(lost.values()):
                families.add("muster_goodput_ratio", trained / allocated, window)
            for category, node_s in lost.items():
                families.add("muster_lost_node_seconds", node_s, window, category.value)

    def close(self) -> None:
        """Sum up no more."""
        if self._summing is not None:
            self._summing.cancel()

    async def _sum_up(self) -> None:
        for window, seconds in WINDOWS_S.items():
            now = self._engine.clock.now()
            rows = await self._accounts.summary(now - seconds, now, "account", None)
            sums: dict[str, float] = {}
            for row in rows or ():
                for category, node_s in row.node_s.items():
                    sums[category] = sums.get(category, 0.0) + node_s
            self._node_s[window] = sums
        self._summed_at = self._engine.clock.now()
