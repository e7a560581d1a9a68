"""All nodes that Slurm has, and their leaf switches: the roll call shows by them who is missing.

Slurm is asked in the background, once a minute, so that a request of a user never waits for Slurm and costs it nothing.
While Slurm does not answer, the last answer stands.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from typing import NoReturn, Protocol

from muster.slurm.client.types import Gone, Node, NodeAnswers, Topology, Unknown

EVERY_S = 60.0
"""Seconds between two questions for all nodes. Nodes come and go with changes of slurm.conf, which are rare; the answer
with 12,500 nodes takes 0.5 s of CPU time (measured with scontrol's JSON of 25 MB)."""
AGAIN_S = 5.0
"""Seconds until Slurm is asked again while it has never answered."""
DEADLINE_S = 30.0
"""Seconds for one answer. Nobody waits for it."""
_log = logging.getLogger(__name__)


class Questions(Protocol):
    """Of Slurm (slurm/client/types.py), what is asked here."""

    async def nodes(self, names: Collection[str] | None = None, *, timeout_s: float) -> NodeAnswers | Unknown: ...
    async def topology(self, *, timeout_s: float) -> Topology | Unknown: ...


class SlurmRoster:
    """Slurm's newest answers.

    `nodes`: every node that Slurm has, by name. `unknown`: why Slurm has never said which nodes it has; empty once it
    has.
    """

    def __init__(self, slurm: Questions) -> None:
        self._slurm = slurm
        self._topology = Topology()
        self.nodes: Mapping[str, Node] = {}
        self.unknown = "Slurm has not answered yet"

    def leaf(self, node: str) -> str:
        """The leaf switch of `node`; empty where the fabric is flat or Slurm has not told it."""
        return self._topology.leaf(node) or ""

    async def run(self) -> NoReturn:
        """Ask until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(AGAIN_S if self.unknown else EVERY_S)

    async def ask(self) -> None:
        """Ask once for all nodes and for the topology."""
        nodes = await self._slurm.nodes(timeout_s=DEADLINE_S)
        if isinstance(nodes, Unknown):
            _log.warning("Slurm doesn't tell which nodes it has: %s", nodes.reason)
            self.unknown = self.unknown and nodes.reason
        else:
            self.nodes = {name: node for name, node in nodes.items() if not isinstance(node, Gone)}
            self.unknown = ""
        topology = await self._slurm.topology(timeout_s=DEADLINE_S)
        if not isinstance(topology, Unknown):
            self._topology = topology
