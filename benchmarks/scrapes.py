"""What a scrape of the coordinator's metrics costs, with 12,500 nodes in 1,000 jobs, and what it does to heartbeats.

The heartbeats of all nodes and agents are posted on the event loop at their rate; a heartbeat is late by the time from
its due moment until it is processed. The scrapes come over HTTP from another process, one each second.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path

from benchmarks.fleet import Fleet
from muster.daemon.coordinator.accounting.gang_accounts import GangAccounts
from muster.daemon.coordinator.core.state import events
from muster.daemon.coordinator.journal.journal import Journal
from muster.daemon.coordinator.metrics.coordinator_metrics import Metrics
from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.coordinator.services.login_names import LoginNames
from muster.daemon.coordinator.shell.engine import Engine
from muster.daemon.coordinator.slurm.local_slurm import LocalSlurm
from muster.daemon.coordinator.slurm.roster import SlurmRoster
from muster.daemon.host import clock
from muster.daemon.host.process.process_memory import collect_seldom
from muster.daemon.metrics.metrics_access import MetricsAccess
from muster.daemon.transport.identity import SecretCredentials

NODES, GANGS = 12_500, 1_000
HEARTBEATS_PER_S, SLOT_S = 5_000, 0.01
"""Of each node's daemon and of each agent, every five seconds."""
SCRAPES = 15
_SCRAPE = """
import json, sys, time, urllib.request
for _ in range(int(sys.argv[2])):
    time.sleep(1)
    began = time.monotonic()
    size = len(urllib.request.urlopen(sys.argv[1]).read())
    print(json.dumps([time.monotonic() - began, size]), flush=True)
"""

Figures = dict[str, float]


class Heartbeats:
    """Posts the heartbeats of all nodes and agents of `fleet`. `late_s`: by how much each slot of them came late."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.late_s: list[float] = []

    async def run(self) -> None:
        """Post for ever."""
        gangs = self._fleet.core.state.gangs.values()
        of_nodes = [events.NodeHeartbeat(node) for gang in gangs for node in gang.roster.members]
        of_agents = [events.AgentHeartbeat(gang.id, node) for gang in gangs for node in gang.roster.members]
        upcoming, due = cycle((*of_nodes, *of_agents)), clock.monotonic()
        while True:
            for _ in range(int(HEARTBEATS_PER_S * SLOT_S)):
                self._fleet.core.decide(next(upcoming), self._fleet.now)
            self.late_s.append(clock.monotonic() - due)
            due += SLOT_S
            await asyncio.sleep(due - clock.monotonic())

    def p99_ms(self) -> float:
        """Of the slots since the last call."""
        found, self.late_s = self.late_s, []
        return 1000 * statistics.quantiles(found, n=100)[98]


async def _measure(folder: Path) -> Figures:
    fleet, journal = Fleet(), Journal(folder)
    fleet.train(NODES, GANGS)
    credentials = SecretCredentials.create(folder / "secret")
    engine = Engine(journal, journal.load(), LocalSlurm(), credentials)
    engine.core = fleet.core
    metrics = Metrics(Policy.load(), engine, SlurmRoster(LocalSlurm()), LoginNames(), GangAccounts(engine, folder))
    address = f"http://127.0.0.1:{metrics.serve(MetricsAccess('127.0.0.1', 0))}/metrics"
    began = time.process_time()
    await asyncio.to_thread(metrics.text)
    cpu_ms = 1000 * (time.process_time() - began)
    heartbeats = Heartbeats(fleet)
    beating = asyncio.create_task(heartbeats.run())
    await asyncio.sleep(SCRAPES)
    calm_ms = heartbeats.p99_ms()
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SCRAPE, address, str(SCRAPES), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await reader.communicate()
    beating.cancel()
    found = [json.loads(line) for line in out.splitlines()]
    await metrics.stop()
    journal.close()
    return {
        "metrics_render_ms": 1000 * statistics.median(took for took, _ in found),
        "metrics_cpu_ms": cpu_ms,
        "metrics_mib": found[-1][1] / 2**20,
        "heartbeat_late_p99_ms": heartbeats.p99_ms(),
        "heartbeat_late_p99_without_scrapes_ms": calm_ms,
    }


def metrics_render() -> Figures:
    """See the module. metrics_render_ms is from the request to the last byte of the answer."""
    collect_seldom()  # as the coordinator does
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(Path(folder)))
