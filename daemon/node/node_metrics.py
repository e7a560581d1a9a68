"""The metrics of one node: what its musterd sees, and what agents on the node report of their ranks.

Agents report over musterd's Unix socket, so that no process of a user listens for Prometheus. Any user of the node may
report anything for any job number, so their series name the uid, which the kernel has proved; and a user has few of
them at the same time, and few new ones in an hour. What was not repeated for a while is shown no more.

What belongs to a GPU names it as nvidia-smi counts. What the exporter of NVIDIA's own data says of it is not repeated.
"""

from __future__ import annotations

import threading
from collections import Counter as Counts
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Metric, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from muster import __version__
from muster.daemon.host import clock
from muster.daemon.node.sensors.sensor import OVER, Observation
from muster.daemon.node.signal_windows import ConditionKey
from muster.daemon.transport.job_limits import MAX_SECONDS
from muster.v1.memory_pb2 import ReportRanks

MOST_SIGNALS = 400
"""Series of signals, by kind, code and GPU. The policy knows 180 kinds and codes."""
MOST_RANKS, MOST_JOBS_OF_USER, MOST_JOBS = 64, 4, 16
"""Ranks of one report, and jobs that are shown at the same time."""
MOST_NEW, NEW_S = 256, 3600.0
"""Jobs, and places of ranks in them, that one user may bring within so many seconds. A job of 8 ranks has 9."""
REPORTED_S = 60.0
"""Seconds for which a report is shown. An agent repeats it every 15 s."""


@dataclass(frozen=True, slots=True)
class NodeValues:
    """What the daemon knows now. `answered_at`: when the coordinator last answered (monotonic seconds); 0: never.
    `waiting`: observations that it has not confirmed. `driver_lines`: as in KernelLogSensor. `gpus`: each GPU's
    index by its device. `lasting`: the conditions that were reported and are not over."""

    answered_at: float
    waiting: int
    kept_bytes: int
    lines_not_understood: int
    driver_lines: Mapping[str, int]
    gpus: Mapping[str, int]
    lasting: Collection[ConditionKey]


class RankReports:
    """The newest reports of agents, by uid and job. Several threads call it."""

    def __init__(self, now: Callable[[], float] = clock.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._newest: dict[tuple[int, int], tuple[float, ReportRanks]] = {}
        self._new: list[tuple[float, int, int]] = []
        """When which uid has brought how many."""

    def take(self, uid: int, report: ReportRanks) -> str:
        """Take a report. Returns why not; empty: it is taken."""
        if len(report.ranks) > MOST_RANKS:
            return f"a report has {MOST_RANKS} ranks at most"
        key = uid, report.slurm_job_id
        with self._lock:
            others = [one for one in self._shown() if one != key]
            if len(others) >= MOST_JOBS or sum(of == uid for of, _ in others) >= MOST_JOBS_OF_USER:
                return "too many jobs of this node report their ranks"
            if not self._may_be_new(uid, len(_places(report)) + 1 - self._known(key, report)):
                return f"a user brings {MOST_NEW} new jobs and ranks to a node within an hour at most"
            self._newest[key] = self._now(), report
        return ""

    def shown(self) -> dict[tuple[int, int], ReportRanks]:
        """The reports that still count."""
        with self._lock:
            return {key: self._newest[key][1] for key in self._shown()}

    def _known(self, key: tuple[int, int], report: ReportRanks) -> int:
        """How many of the series of a report there are already."""
        if key not in self._newest:
            return 0
        return 1 + len(_places(report) & _places(self._newest[key][1]))

    def _may_be_new(self, uid: int, count: int) -> bool:
        oldest = self._now() - NEW_S
        self._new = [one for one in self._new if one[0] >= oldest]
        if sum(new for _, of, new in self._new if of == uid) + count > MOST_NEW:
            return False
        if count:
            self._new.append((self._now(), uid, count))
        return True

    def _shown(self) -> list[tuple[int, int]]:
        oldest = self._now() - REPORTED_S
        self._newest = {key: one for key, one in self._newest.items() if one[0] >= oldest}
        return list(self._newest)


def _places(report: ReportRanks) -> set[tuple[int, int]]:
    """Each rank, and its GPU."""
    return {(rank.rank, rank.gpu if rank.HasField("gpu") else -1) for rank in report.ranks}


class NodeMetrics:
    """Fills `registry`. `values`: called in the thread of a scrape."""

    def __init__(self, registry: CollectorRegistry, values: Callable[[], NodeValues]) -> None:
        # The start of the process says when all counters began: further series would say it once more for each.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        ProcessCollector(registry=registry)
        self._values = values
        self.ranks = RankReports()
        self._seen: set[tuple[str, int, str]] = set()
        self._signals = Counter(
            "muster_node_signals", "Signals that this node has reported.", ["kind", "code", "gpu"], registry=registry
        )
        registry.register(self)

    def note(self, observation: Observation, gpus: Mapping[str, int]) -> None:
        """A signal is reported. `gpus`: as in NodeValues."""
        if observation.kind.endswith(OVER):
            return
        key = observation.kind, observation.code, _gpu(gpus, observation.device)
        if key not in self._seen and len(self._seen) >= MOST_SIGNALS:
            self._signals.labels("other", "other", "").inc()
            return
        self._seen.add(key)
        self._signals.labels(*map(str, key)).inc()

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
        words = "Kernel messages in which a driver speaks of trouble in words that Muster does not know."
        lines = CounterMetricFamily("muster_kernel_driver_lines", words, labels=("driver",))
        for driver, count in sorted(values.driver_lines.items()):
            lines.add_metric((driver,), count)
        yield lines
        yield _lasting(values)
        yield from _of_ranks(self.ranks.shown(), {str(index) for index in values.gpus.values()})


def _gpu(gpus: Mapping[str, int], device: str) -> str:
    """The index of the GPU of that device, for a label; empty: the device is none."""
    return str(gpus[device]) if device in gpus else ""


def _lasting(values: NodeValues) -> Metric:
    """Of several devices that are no GPUs, the conditions of one kind are counted."""
    found = GaugeMetricFamily(
        "muster_node_conditions", "Conditions that last, as the policy judges them.", labels=("kind", "code", "gpu")
    )
    counts = Counts((kind, str(code), _gpu(values.gpus, device)) for kind, code, device in values.lasting)
    for key, count in sorted(counts.items())[:MOST_SIGNALS]:
        found.add_metric(key, count)
    return found


def _of_ranks(reports: dict[tuple[int, int], ReportRanks], gpus: set[str]) -> Iterator[Metric]:
    of_rank = ("uid", "job_id", "rank", "gpu")
    steps = GaugeMetricFamily("muster_rank_step", "The newest step of a rank, and its GPU.", labels=of_rank)
    works = GaugeMetricFamily(
        "muster_rank_compute_seconds", "Median time in a step for which a rank works itself.", labels=of_rank
    )
    sizes = GaugeMetricFamily(
        "muster_node_checkpoint_bytes", "Shards in memory, of ranks of the node and of others.",
        labels=("uid", "job_id", "kind"),
    )  # fmt: skip
    for (uid, job), report in sorted(reports.items()):
        for rank, one in {one.rank: one for one in report.ranks}.items():
            gpu = str(one.gpu) if one.HasField("gpu") and str(one.gpu) in gpus else ""
            labels = str(uid), str(job), str(rank), gpu
            steps.add_metric(labels, one.step)
            if 0 < one.compute_s < MAX_SECONDS:
                works.add_metric(labels, one.compute_s)
        sizes.add_metric((str(uid), str(job), "own"), report.own_bytes)
        sizes.add_metric((str(uid), str(job), "replica"), report.replica_bytes)
    yield from (steps, works, sizes)
