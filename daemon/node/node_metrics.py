"""The metrics of one node: what its musterd sees, and what agents on the node report of their ranks.

Agents report over musterd's Unix socket, so that no process of a user listens for Prometheus. Any user of the node may
report anything for any job number, so their series name the uid, which the kernel has proved; and a user has few of
them. What was not repeated for a while is shown no more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Metric, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from muster import __version__
from muster.daemon.host import clock
from muster.daemon.node.sensors.sensor import OVER, Observation
from muster.v1.memory_pb2 import ReportRanks

MOST_SIGNALS = 200
"""Kinds and codes of signals with a series of their own. The policy knows 180."""
MOST_RANKS, MOST_JOBS_OF_USER, MOST_JOBS = 64, 4, 16
"""Ranks of one report, and jobs that are shown at the same time."""
REPORTED_S = 60.0
"""Seconds for which a report is shown. An agent repeats it every 15 s."""


@dataclass(frozen=True, slots=True)
class NodeValues:
    """What the daemon knows now. `answered_at`: when the coordinator last answered (monotonic seconds); 0: never.
    `waiting`: observations that it has not confirmed."""

    answered_at: float
    waiting: int
    kept_bytes: int
    lines_not_understood: int


class RankReports:
    """The newest reports of agents, by uid and job. Several threads call it."""

    def __init__(self, now: Callable[[], float] = clock.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._newest: dict[tuple[int, int], tuple[float, ReportRanks]] = {}

    def take(self, uid: int, report: ReportRanks) -> str:
        """Take a report. Returns why not; empty: it is taken."""
        if len(report.ranks) > MOST_RANKS:
            return f"a report has {MOST_RANKS} ranks at most"
        key = uid, report.slurm_job_id
        with self._lock:
            others = [one for one in self._shown() if one != key]
            if len(others) >= MOST_JOBS or sum(of == uid for of, _ in others) >= MOST_JOBS_OF_USER:
                return "too many jobs of this node report their ranks"
            self._newest[key] = self._now(), report
        return ""

    def shown(self) -> dict[tuple[int, int], ReportRanks]:
        """The reports that still count."""
        with self._lock:
            return {key: self._newest[key][1] for key in self._shown()}

    def _shown(self) -> list[tuple[int, int]]:
        oldest = self._now() - REPORTED_S
        self._newest = {key: one for key, one in self._newest.items() if one[0] >= oldest}
        return list(self._newest)


class NodeMetrics:
    """Fills `registry`. `values`: called in the thread of a scrape."""

    def __init__(self, registry: CollectorRegistry, values: Callable[[], NodeValues]) -> None:
        # The start of the process says when all counters began: further series would say it once more for each.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        ProcessCollector(registry=registry)
        self._values = values
        self.ranks = RankReports()
        self._seen: set[tuple[str, int]] = set()
        self._signals = Counter(
            "muster_node_signals", "Signals that this node has reported.", ["kind", "code"], registry=registry
        )
        registry.register(self)

    def note(self, observation: Observation) -> None:
        """A signal is reported."""
        if observation.kind.endswith(OVER):
            return
        key = observation.kind, observation.code
        if key not in self._seen and len(self._seen) >= MOST_SIGNALS:
            self._signals.labels("other", "other").inc()
            return
        self._seen.add(key)
        self._signals.labels(observation.kind, str(observation.code)).inc()

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client.registry.Collector."""
        values = self._values()
        yield InfoMetricFamily("muster_build", "The version of musterd.", value={"version": __version__})
        age = GaugeMetricFamily("muster_coordinator_answer_age_seconds", "Time since the coordinator last answered.")
        if values.answered_at:
            age.add_metric((), clock.monotonic() - values.answered_at)
        yield age
        yield GaugeMetricFamily("muster_signals_waiting", "Signals not confirmed yet.", value=values.waiting)
        yield GaugeMetricFamily("muster_kept_memory_bytes", "Memory of ended jobs.", value=values.kept_bytes)
        words = "Kernel messages of errors of NVIDIA's driver that could not be read."
        yield CounterMetricFamily("muster_kernel_lines_unparsed", words, value=values.lines_not_understood)
        yield from _of_ranks(self.ranks.shown())


def _of_ranks(reports: dict[tuple[int, int], ReportRanks]) -> Iterator[Metric]:
    steps = GaugeMetricFamily("muster_rank_step", "The newest step of a rank.", labels=("uid", "job_id", "rank"))
    sizes = GaugeMetricFamily(
        "muster_node_checkpoint_bytes", "Shards in memory, of ranks of the node and of others.",
        labels=("uid", "job_id", "kind"),
    )  # fmt: skip
    for (uid, job), report in sorted(reports.items()):
        for rank, step in {one.rank: one.step for one in report.ranks}.items():
            steps.add_metric((str(uid), str(job), str(rank)), step)
        sizes.add_metric((str(uid), str(job), "own"), report.own_bytes)
        sizes.add_metric((str(uid), str(job), "replica"), report.replica_bytes)
    yield from (steps, sizes)
