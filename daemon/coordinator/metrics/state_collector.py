"""Collects what there is now: jobs, nodes, the coordinator itself. The values are those of the views of users.

The state is read on the event loop, because nothing else may read it, in slices of 1 ms: a heartbeat waits for one
slice at most. The text is made in the thread of the scrape. Nodes in full health are counted, and have no series of
their own.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as TooSlow

from prometheus_client import Metric

from muster import __version__
from muster.daemon.coordinator.core.state.durable_state import DurableState
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.observed_state import ObservedGang, ObservedState
from muster.daemon.coordinator.metrics.families import DURABLE, MEMORY, REPORTED, Families
from muster.daemon.coordinator.metrics.fleet_goodput import FleetGoodput
from muster.daemon.coordinator.services.login_names import LoginNames
from muster.daemon.coordinator.services.roll_call import UNHEARD, known_nodes, shown_health
from muster.daemon.coordinator.services.views import GoodputOf, add_account, gang_view
from muster.daemon.coordinator.shell.engine import Engine
from muster.daemon.coordinator.slurm.roster import SlurmRoster
from muster.daemon.coordinator.view_parts.training import add_training
from muster.daemon.host import clock
from muster.daemon.metrics.metrics_server import NoValuesError
from muster.node_health import OUT_OF_SERVICE, NodeHealth
from muster.v1 import api_pb2

SLICE_S = 0.001
"""Seconds for which the event loop collects before it does what else there is."""
BUSY_S, WAIT_S = 0.0005, 0.025
"""Seconds of a turn of the event loop from which on it has much to do, and that a slice waits for it at most."""
COLLECT_S = 10.0
"""Seconds that a scrape waits for its values."""
_QUANTILES = (0.5, 0.9, 0.99, 1.0)


class StateCollector:
    """A collector of prometheus_client, for threads other than that of `engine`'s event loop."""

    def __init__(
        self,
        engine: Engine,
        roster: SlurmRoster,
        login_names: LoginNames,
        goodput: GoodputOf,
        fleet_goodput: FleetGoodput,
    ) -> None:
        """Made on the event loop. `goodput`: the account of a gang until now."""
        self._goodput, self._fleet_goodput = goodput, fleet_goodput
        self._engine, self._roster, self._login_names = engine, roster, login_names
        self._loop = asyncio.get_running_loop()
        self._turn = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Raises NoValuesError: the event loop ends, or has too much to do."""
        with self._turn:
            found = self._ask()
        yield from found

    def _ask(self) -> list[Metric]:
        if self._loop.is_closed():
            raise NoValuesError("the coordinator is stopping")
        asked = asyncio.run_coroutine_threadsafe(self._collect(), self._loop)
        try:
            return asked.result(COLLECT_S)
        except TooSlow:
            asked.cancel()
            raise NoValuesError(f"the coordinator did not answer within {COLLECT_S:.0f} s") from None
        except CancelledError:
            raise NoValuesError("the coordinator is stopping") from None

    async def _collect(self) -> list[Metric]:
        families, slices = Families(), _Slices()
        state, observed = self._engine.core.state, self._engine.core.observed
        users: dict[int, str] = {}  # a directory that is silent holds each user up once, and not each job
        for gang in list(state.gangs.values()):
            if not gang.final:
                if (uid := gang.account.owner_uid) not in users:
                    users[uid] = await self._login_names(uid)
                now = self._engine.clock.now()
                view = gang_view(state, observed, gang, now, brief=True, for_people=False)
                add_training(view, gang, observed.gangs.get(gang.id) or ObservedGang(), brief=False)
                add_account(view, gang, now, self._goodput)
                add_gang(families, view, state, observed, gang, users[uid])
                await slices.next()
        await self._add_nodes(families, slices)
        self._fleet_goodput.add_to(families)
        self._add_coordinator(families)
        families.add("muster_scrape_duration_seconds", clock.monotonic() - slices.began)
        return list(families.all())

    async def _add_nodes(self, families: Families, slices: _Slices) -> None:
        state, observed = self._engine.core.state, self._engine.core.observed
        suspected = {node for gang in observed.gangs.values() for node in gang.suspected_since}
        counts, ages = Counter[str](), list[float]()
        for name in known_nodes(state, observed, self._roster):
            health = shown_health(state, observed, name)
            if name in suspected and health not in OUT_OF_SERVICE:
                health = NodeHealth.SUSPECT.value
            counts[health] += 1
            if health not in (NodeHealth.FIT, UNHEARD):
                families.add("muster_node_health", 1, name, health)
            seen = observed.nodes.get(name)
            if seen is not None and seen.attached and health not in OUT_OF_SERVICE:
                ages.append(self._engine.clock.now() - seen.heard_at)
            await slices.next()
        for health in (*(one.value for one in NodeHealth), UNHEARD):
            families.add("muster_nodes", counts[health], health)
        _add_ages(families, "musterd", ages)

    def _add_coordinator(self, families: Families) -> None:
        engine, state, now = self._engine, self._engine.core.state, self._engine.clock.now()
        ages = [
            now - agent.heard_at
            for gang in engine.core.observed.gangs.values()
            for node, agent in gang.agents.items()
            if agent.attached and state.node(node).health not in OUT_OF_SERVICE
        ]
        _add_ages(families, "agent", ages)
        families.add_info("muster_build", "The version of the coordinator.", {"version": __version__})
        families.add("muster_slurm_calls_owed", len(state.owed))
        families.add("muster_load_shedding_level", engine.shedding.level)
        families.add_counter(
            "muster_journal_write_seconds", "Time that writes into the journal have taken.", engine.journal_write_s
        )


class _Slices:
    """Lets the event loop do all else that there is, once a slice is used up."""

    def __init__(self, now: Callable[[], float] = clock.monotonic) -> None:
        self._now = now
        self.began = self._slice_began = now()

    async def next(self) -> None:
        """Between two values."""
        ended = self._now()
        if ended - self._slice_began < SLICE_S:
            return
        turn_began = ended
        await asyncio.sleep(0)
        # A loop with much to do is behind: it goes first, but not for ever.
        while self._now() - turn_began > BUSY_S and self._now() - ended < WAIT_S:
            turn_began = self._now()
            await asyncio.sleep(0)
        self._slice_began = self._now()


def add_gang(
    families: Families, view: api_pb2.GangView, state: DurableState, observed: ObservedState, gang: Gang, user: str
) -> None:
    """The series of one job, which users see like this."""
    job = str(gang.slurm.job)
    seen = observed.gangs.get(gang.id) or ObservedGang()
    families.add_job(job, view.name, user)
    families.add("muster_job_phase", 1, job, view.phase)
    families.add("muster_job_nodes", len(gang.roster.seats), job)
    families.add("muster_generation", view.generation, job)
    families.add("muster_step", view.step, job)
    ready = sum(_is_ready(state, seen, node) for node in _spare_nodes(gang))
    families.add("muster_spares", ready, job, "ready")
    families.add("muster_spares", max(0, gang.spec.spares - ready), job, "missing")
    _add_checkpoint(families, view.checkpoint, job)
    _add_sizes(families, gang, seen, job)
    if view.HasField("training"):
        _add_training(families, view.training, job)
    if view.goodput.allocated_node_s > 0:
        families.add("muster_job_goodput_ratio", view.goodput.useful_node_s / view.goodput.allocated_node_s, job)


def _add_training(families: Families, training: api_pb2.TrainingView, job: str) -> None:
    families.add_known("muster_step_seconds", training.step_s, job)
    families.add_known("muster_step_compute_seconds", training.compute_s, job)
    families.add_known("muster_step_wait_seconds", training.wait_s, job)
    families.add_known("muster_step_fetch_seconds", training.fetch_s, job)
    families.add_known("muster_mfu_ratio", training.mfu, job)
    families.add_known("muster_tokens_per_gpu_per_second", training.tokens_per_gpu_s, job)
    for one in training.metrics:
        if (family := f"muster_{one.name}") in REPORTED:
            families.add(family, one.median, job)


def _add_checkpoint(families: Families, view: api_pb2.CheckpointView, job: str) -> None:
    families.add_known("muster_checkpoint_seconds", view.stall_s, job, MEMORY)
    families.add_known("muster_checkpoint_seconds", view.flush_s, job, DURABLE)
    if view.HasField("loses_steps"):
        families.add("muster_checkpoint_age_seconds", view.loses_s, job, MEMORY)
    if view.HasField("durable_loses_steps"):
        families.add("muster_checkpoint_age_seconds", view.durable_loses_s, job, DURABLE)


def _add_sizes(families: Families, gang: Gang, seen: ObservedGang, job: str) -> None:
    shards = (shard.size for agent in seen.agents.values() if agent.attached for shard in agent.status.shards)
    families.add_known("muster_checkpoint_bytes", sum(shards), job, MEMORY)
    if (flush := gang.checkpoint.flush) is not None:
        sizes = (one.total for one in seen.flush_pace.progress(flush.serial).values())
        families.add_known("muster_checkpoint_bytes", sum(sizes), job, DURABLE)


def _spare_nodes(gang: Gang) -> Iterable[str]:
    seated = {seat.node for seat in gang.roster.seats}
    return (member.node for member in gang.roster.members.values() if not member.removed and member.node not in seated)


def _is_ready(state: DurableState, seen: ObservedGang, node: str) -> bool:
    """The spare can be told to take a seat, and nothing speaks against it."""
    return seen.is_attached(node) and node not in seen.suspected_since and state.node(node).health is NodeHealth.FIT


def _add_ages(families: Families, source: str, ages: Sequence[float]) -> None:
    ordered = sorted(ages)
    for quantile in _QUANTILES if ordered else ():
        value = ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]
        families.add("muster_heartbeat_age_seconds", max(0.0, value), source, f"{quantile:g}")
