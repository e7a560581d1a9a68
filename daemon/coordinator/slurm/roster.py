"""The roster: all nodes that Slurm has. The roll call compares it with the nodes heard from.

The roster asks Slurm in the background once a minute, so a user's request never waits for Slurm and costs Slurm
nothing. While Slurm does not answer, the last answer is kept.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import NoReturn

from muster.daemon.host import clock
from muster.daemon.host.lasting_problem import LastingProblem
from muster.slurm.client.types import Gone, Node, Slurm, Unknown

REFRESH_INTERVAL_S = 60.0
"""Seconds between two calls for all nodes. Nodes come and go with changes of slurm.conf, which are rare; the answer
with 12,500 nodes takes 0.5 s of CPU time (measured with scontrol's JSON of 25 MB)."""
RETRY_INTERVAL_S = 5.0
"""Seconds between two calls as long as Slurm has never answered."""
DEADLINE_S = 30.0
"""Seconds for one answer. No request waits for it."""
_log = logging.getLogger(__name__)


class SlurmRoster:
    """The newest answers of Slurm.

    `nodes`: every node that Slurm has, by name. `unknown`: why there is no answer yet; empty after the first answer.
    `hides_nodes`: Slurm's PrivateData has jobs or nodes; True until Slurm has said what it has. `private_unknown`: why
    Slurm has not said it yet; empty after the first answer.
    """

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        self._nodes_unknown = LastingProblem(_log, "Slurm answers with its list of nodes again")
        self._private_unknown = LastingProblem(_log, "Slurm says what is private again")
        self._refreshing: asyncio.Task[None] | None = None
        self._asked_at = self._answered_at = -math.inf
        self.nodes: Mapping[str, Node] = {}
        self.unknown = "Slurm has not answered yet"
        self.hides_nodes = True
        self.private_unknown = "Slurm has not answered yet"

    def age_s(self) -> float:
        """Seconds since the call whose answer `nodes` is; infinite before the first answer."""
        return clock.monotonic() - self._answered_at

    async def refresh_if_older(self, than_s: float) -> None:
        """Refresh the roster, unless a call for it began within `than_s` seconds. Simultaneous callers share one."""
        if self._refreshing is None or self._refreshing.done():
            if clock.monotonic() - self._asked_at < than_s:
                return
            self._refreshing = asyncio.create_task(self.refresh())
        await asyncio.shield(self._refreshing)

    async def run(self) -> NoReturn:
        """Refresh the roster until cancelled."""
        while True:
            await self.refresh_if_older(0.0)
            await self.ask_what_is_private()
            await asyncio.sleep(RETRY_INTERVAL_S if self.unknown else REFRESH_INTERVAL_S)

    async def ask_what_is_private(self) -> None:
        """Ask Slurm once for PrivateData. The last answer is kept."""
        private = await self._slurm.private_data(timeout_s=DEADLINE_S)
        if not isinstance(private, Unknown):
            self._private_unknown.end()
            self.hides_nodes, self.private_unknown = not private.isdisjoint({"jobs", "nodes"}), ""
            return
        self.private_unknown = self.private_unknown and private.reason
        if not self._nodes_unknown.lasts:  # otherwise its line says that Slurm does not answer
            kept = "users see the nodes of their own jobs only" if self.private_unknown else "the last answer counts"
            self._private_unknown.meet(f"can't read PrivateData in Slurm's configuration: {private.reason}; {kept}")

    async def refresh(self) -> None:
        """Ask Slurm once for all nodes."""
        self._asked_at = asked_at = clock.monotonic()
        nodes = await self._slurm.nodes(timeout_s=DEADLINE_S)
        if isinstance(nodes, Unknown):
            self._nodes_unknown.meet(f"can't get the list of nodes from Slurm: {nodes.reason}")
            self.unknown = self.unknown and nodes.reason
        else:
            self._nodes_unknown.end()
            self.nodes = {name: node for name, node in nodes.items() if not isinstance(node, Gone)}
            self.unknown, self._answered_at = "", asked_at
