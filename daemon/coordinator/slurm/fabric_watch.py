"""Reads the site's fabric again and again: Slurm's topologies, and what /etc/muster/fabric.toml adds to them.

It posts a FabricSeen event when that is first read and whenever it has changed, so that a site may re-cable its network
while jobs run. A Slurm that does not answer is no evidence: what was read before still holds. So it is with a file that
has become wrong; the warnings say so.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.slurm.roster import SlurmRoster
from muster.daemon.host import clock, toml_text
from muster.daemon.host.lasting_problem import LastingProblem
from muster.fabric.sources.site_file import SiteFabric
from muster.fabric.sources.slurm_topology import SlurmTopology
from muster.slurm.client.parsing.site_fabric import SiteFileError, fabric_of, read_site_file
from muster.slurm.client.types import Node, Slurm, Unknown

READ_INTERVAL_S = 60.0
"""Seconds between two readings. Networks change by hand, and seldom."""
RETRY_INTERVAL_S = 5.0
"""Seconds between two readings as long as nothing could be read."""
DEADLINE_S = 30.0
"""Seconds for Slurm's answer."""
NODES_VALID_S = 60.0
"""Seconds for which the roster's nodes are those of the site."""
ATTACH_WAIT_S = 2.0
"""Seconds for which a new agent waits for a newer reading, if there is one."""
_log = logging.getLogger(__name__)


class FabricWatch:
    """The newest reading of the site's fabric."""

    def __init__(
        self, slurm: Slurm, roster: SlurmRoster, post: Callable[[events.Event], None], file: Path | None
    ) -> None:
        """`file`: the site's own file; None: there is none. `post` takes the events."""
        self._slurm = slurm
        self._roster = roster
        self._post = post
        self._file = file
        self._site = SiteFabric()
        """The file's content when it was last right."""
        self._unknown = LastingProblem(_log, "Slurm answers with its topology again")
        self._seen: events.FabricSeen | None = None
        self._reading: asyncio.Task[None] | None = None
        self._began_at = -math.inf
        self._stamp = (0, 0)

    async def run(self) -> NoReturn:
        """Read until cancelled."""
        while True:
            await self.read_if_older(0.0)
            await asyncio.sleep(READ_INTERVAL_S if self._is_known else RETRY_INTERVAL_S)

    async def wait_until_known(self, than_s: float) -> None:
        """Read the fabric, unless a reading began within `than_s` seconds and the site's file is the same since. If an
        earlier reading has succeeded, wait for this one for ATTACH_WAIT_S at most."""
        if self._stamp != self._stamp_of_file():
            than_s = 0.0
        try:
            async with asyncio.timeout(ATTACH_WAIT_S if self._is_known else None):
                await self.read_if_older(than_s)
        except TimeoutError:
            _log.debug("Slurm is slow to say what its topology is: what it said before is used")

    async def read_if_older(self, than_s: float) -> None:
        """Read the fabric, unless a reading began within `than_s` seconds. Simultaneous callers share one."""
        if self._reading is None or self._reading.done():
            if clock.monotonic() - self._began_at < than_s:
                return
            self._reading = asyncio.create_task(self.read())
        await asyncio.shield(self._reading)

    async def read(self) -> None:
        """Read the fabric once."""
        self._began_at, self._stamp = clock.monotonic(), self._stamp_of_file()
        await self._roster.refresh_if_older(0.0 if self._roster.unknown else NODES_VALID_S)
        topologies = await self._slurm.topologies(timeout_s=DEADLINE_S)
        reason = topologies.reason if isinstance(topologies, Unknown) else self._roster.unknown
        if isinstance(topologies, Unknown) or reason:
            problem = f"the network's topology is not known: {reason}"
            self._unknown.meet(problem)
            if not self._is_known:
                self._note(events.FabricSeen(problem=problem))
            return
        self._unknown.end()
        self._note(await asyncio.to_thread(self._understand, topologies, self._roster.nodes))

    @property
    def _is_known(self) -> bool:
        return self._seen is not None and bool(self._seen.topologies)

    def _stamp_of_file(self) -> tuple[int, int]:
        """Changes when the site's file does: an operator who has edited it must not wait before a job is submitted."""
        try:
            found = self._file.stat() if self._file is not None else None
        except OSError:
            found = None
        return (found.st_mtime_ns, found.st_size) if found is not None else (0, 0)

    def _understand(self, topologies: Sequence[SlurmTopology], nodes: Mapping[str, Node]) -> events.FabricSeen:
        """Runs in a thread: a large site takes a second."""
        warnings: tuple[str, ...] = ()
        if self._file is not None:
            try:
                self._site = read_site_file(self._file, nodes, toml_text.loads)
            except SiteFileError as error:
                warnings = (f"{error}; what it said before that, if anything, still holds",)
        found = []
        for topology in topologies:
            reading = fabric_of(topology, nodes, self._site, alone=len(topologies) == 1)
            found.append(
                events.TopologySeen(
                    reading.fabric, topology.default, topology.partitions, (*warnings, *reading.warnings)
                )
            )
        return events.FabricSeen(tuple(found))

    def _note(self, seen: events.FabricSeen) -> None:
        if self._seen is not None and _same(self._seen, seen):
            return
        self._seen = seen
        for warning in dict.fromkeys(warning for one in seen.topologies for warning in one.warnings):
            _log.warning("%s", warning)
        self._post(seen)


def _same(before: events.FabricSeen, now: events.FabricSeen) -> bool:
    """Both are equal, and the names of domains, too."""
    return before == now and _names(before) == _names(now)


def _names(seen: events.FabricSeen) -> list[str]:
    return [domain.name for one in seen.topologies for domain in one.fabric.root.walk()]
