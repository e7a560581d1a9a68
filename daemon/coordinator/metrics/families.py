"""The metrics that are collected for each scrape: their names, types and labels. docs/operations/metrics.md lists them.

A family is a metric with all its series. A job has one series of each, named by its Slurm job number; its name and
its owner are labels of muster_job_info alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

JOB, JOB_TIER = ("job_id",), ("job_id", "tier")
MEMORY, DURABLE = "memory", "durable"
"""The tiers of checkpoints."""
REPORTED = frozenset({"muster_loss", "muster_gradient_norm"})
"""Numbers that scripts report. Those with names of a script's own are not here: nothing bounds how many there are."""
GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "muster_job_phase": ("1 in the phase that the job is in.", ("job_id", "phase")),
    "muster_job_nodes": ("Nodes that carry ranks of the job.", JOB),
    "muster_generation": ("The newest generation of the job.", JOB),
    "muster_step": ("The newest finished step of the job. It falls when steps are lost.", JOB),
    "muster_spares": ("Spares of the job, ready to take a seat, or missing of what it asks for.", ("job_id", "state")),
    "muster_step_seconds": ("Median time of a step.", JOB),
    "muster_step_compute_seconds": ("Median time in a step for which ranks compute, with the wait for data.", JOB),
    "muster_step_wait_seconds": ("Median time in a step for which ranks wait for other ranks.", JOB),
    "muster_step_fetch_seconds": ("Median time in a step for which ranks wait for their next batch.", JOB),
    "muster_mfu_ratio": ("The share of the GPUs' peak that the model's arithmetic takes.", JOB),
    "muster_tokens_per_gpu_per_second": ("Tokens that one GPU processes in a second.", JOB),
    "muster_loss": ("The loss, as the median rank reports it.", JOB),
    "muster_gradient_norm": ("The gradient norm, as the median rank reports it.", JOB),
    "muster_checkpoint_bytes": ("Bytes of the checkpoints that are held in memory, or of the newest flush.", JOB_TIER),
    "muster_checkpoint_seconds": ("Time for which a snapshot holds training up, or that a flush takes.", JOB_TIER),
    "muster_checkpoint_age_seconds": ("Training time that is lost if a fault strikes now.", JOB_TIER),
    "muster_job_goodput_ratio": (
        "The part of the job's allocated time that trained; without steps: that ranks ran.",
        JOB,
    ),
    "muster_goodput_ratio": ("The part of the allocated time of all jobs that trained.", ("window",)),
    "muster_lost_node_seconds": ("Allocated time of all jobs that trained nothing new.", ("window", "category")),
    "muster_nodes": ("Nodes by health.", ("health",)),
    "muster_node_health": ("1 for a node that is not in full health, with its health.", ("node", "health")),
    "muster_heartbeat_age_seconds": ("Quantiles of the time since a node's last message.", ("source", "quantile")),
    "muster_slurm_calls_owed": ("Calls to Slurm that are decided and not settled.", ()),
    "muster_load_shedding_level": ("0; 1: no new watchers are admitted; 2: watchers end.", ()),
    "muster_scrape_duration_seconds": ("Time that the collection of these values took.", ()),
}


class Families:
    """The families of one scrape. `add` a sample to one."""

    def __init__(self) -> None:
        self._gauges = {name: GaugeMetricFamily(name, words, labels=labels) for name, (words, labels) in GAUGES.items()}
        self._gauges["muster_heartbeat_age_seconds"].type = "summary"  # only a summary may have the label `quantile`
        self._jobs = InfoMetricFamily("muster_job", "The name and the owner of a job.", labels=JOB)
        self._others: list[Metric] = [self._jobs]

    def add(self, name: str, value: float, *labels: str) -> None:
        """A sample of a gauge. `labels`: the values of its labels, in their order."""
        self._gauges[name].add_metric(labels, value)

    def add_known(self, name: str, value: float, *labels: str) -> None:
        """A sample of a gauge whose value 0 means that it is not known."""
        if value:
            self._gauges[name].add_metric(labels, value)

    def add_job(self, job_id: str, name: str, user: str) -> None:
        """What a job is called, and whose it is."""
        self._jobs.add_metric((job_id,), {"job_name": name, "user": user})

    def add_counter(self, name: str, words: str, value: float) -> None:
        """A counter without labels."""
        self._others.append(CounterMetricFamily(name, words, value=value))

    def add_info(self, name: str, words: str, labels: Mapping[str, str]) -> None:
        """What there is one of."""
        self._others.append(InfoMetricFamily(name, words, value=dict(labels)))

    def all(self) -> Iterator[Metric]:
        """The families that have samples, by name."""
        found = [*self._gauges.values(), *self._others]
        yield from sorted((one for one in found if one.samples), key=lambda one: one.name)
