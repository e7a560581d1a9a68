"""All metrics of a coordinator, and the server that shows them."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics, generate_latest

from muster.daemon.coordinator.accounting.gang_accounts import GangAccounts
from muster.daemon.coordinator.metrics.event_counters import EventCounters
from muster.daemon.coordinator.metrics.fleet_goodput import FleetGoodput
from muster.daemon.coordinator.metrics.state_collector import StateCollector
from muster.daemon.coordinator.policy.policy import Policy
from muster.daemon.coordinator.services.login_names import LoginNames
from muster.daemon.coordinator.shell.engine import Engine
from muster.daemon.coordinator.slurm.roster import SlurmRoster
from muster.daemon.metrics.metrics_access import MetricsAccess
from muster.daemon.metrics.metrics_server import MetricsServer


class Metrics:
    """Counts from the start on, and shows what it has counted from `serve` to `stop`. `events`: is told of signals."""

    def __init__(
        self, policy: Policy, engine: Engine, roster: SlurmRoster, login_names: LoginNames, accounts: GangAccounts
    ) -> None:
        # The start of the process says when all counters began: further series would say it once more for each.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self.events = EventCounters(self._registry, engine.core.state, engine.clock.now, policy)
        engine.on_facts.append(self.events.note_facts)
        self._fleet_goodput = FleetGoodput(engine, accounts)
        collector = StateCollector(engine, roster, login_names, accounts.view, self._fleet_goodput)
        self._registry.register(collector)
        self._server: MetricsServer | None = None

    def serve(self, access: MetricsAccess) -> int:
        """Start to answer. Returns the port. Raises ListenError: the address can't be used."""
        self._server = MetricsServer(access, self._registry)
        self._server.start()
        return self._server.port

    def text(self) -> bytes:
        """What a reader of Prometheus' text format gets. Not for the thread of the event loop."""
        return generate_latest(self._registry)

    async def stop(self) -> None:
        """Answer no more."""
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)
        self._fleet_goodput.close()
