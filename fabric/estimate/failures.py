"""What failures will cost a job: time between them, the checkpoint interval, the share of time that trains. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from muster.fabric.cost import reliability

HOUR = 3600.0
NODE_MTBF = 6_300 * HOUR
"""Seconds, of a node with 8 GPUs. Llama 3 (Grattafiori and others, 2024, section 3.3.4): 419 unexpected interruptions
in 54 days on 16,384 GPUs, which are 2,048 nodes: 6,334 hours a node.
"""


def node_mtbf(gpus: int) -> float:
    """Seconds between failures of a node with so many GPUs, in inverse proportion to them."""
    return NODE_MTBF * 8 / gpus


REPAIR = 24 * HOUR
"""Seconds until a failed node is back. An assumption."""
RESTART = 3.7
"""Seconds from a fault to the next finished step, less the transfer of the state: the worst of the runs of
`make bench-recovery` with a small model (benchmarks/recovery.json, power_loss, 2026-11-22)."""
WAIT_WITHOUT_SPARE = 1 * HOUR
"""Seconds until a requeued job has other nodes. An assumption."""
COPY_BANDWIDTH = 25e9
"""Bytes a second at which a GPU's state is copied into its host's memory. An assumption."""


@dataclass(frozen=True, slots=True)
class Failures:
    """How often nodes fail, and what follows.

    Raises:
        ValueError: a number is not positive.
    """

    nodes: int
    """Nodes that carry ranks."""
    spares: int = 0
    node_mtbf: float = NODE_MTBF
    """Seconds between two failures of one node."""
    repair: float = REPAIR
    restart: float = RESTART
    wait_without_spare: float = WAIT_WITHOUT_SPARE
    node_bandwidth: float = 12.5e9
    """Bytes a second at which a node receives the state of a lost one."""

    def __post_init__(self) -> None:
        if not min(self.nodes, self.node_mtbf, self.node_bandwidth) > 0:
            raise ValueError("nodes, node_mtbf and node_bandwidth must be more than 0")
        if min(self.spares, self.repair, self.restart, self.wait_without_spare) < 0:
            raise ValueError("spares, repair, restart and wait_without_spare must not be negative")


@dataclass(frozen=True, slots=True)
class Outlook:
    """What failures cost. Times are seconds."""

    mtbf: float
    """Between two failures of the job's nodes."""
    checkpoint: float
    """That the ranks wait for one checkpoint."""
    interval: float
    """Between checkpoints: the best one by Daly, and a step at least."""
    recovery: float
    """Mean time from a failure to the next step, with the spares."""
    spare_there: float
    """The probability that a spare is there when a node fails."""
    goodput: float
    """The share of time that trains."""
    goodput_without_spares: float


def outlook(failures: Failures, step: float, gpu_state: float, local_ranks: int) -> Outlook:
    """What failures cost.

    Args:
        failures: how often nodes fail.
        step: seconds of a step.
        gpu_state: bytes of training state on one GPU.
        local_ranks: GPUs of one node.
    """
    mtbf = reliability.fleet_mtbf(failures.node_mtbf, failures.nodes)
    checkpoint = max(gpu_state / COPY_BANDWIDTH, 1e-6)
    interval = max(reliability.daly_interval(mtbf, checkpoint), step)
    with_spare = failures.restart + gpu_state * local_ranks / failures.node_bandwidth
    without = failures.wait_without_spare + with_spare
    there = reliability.spares_suffice(failures.nodes, failures.node_mtbf, failures.repair, failures.spares)
    recovery = reliability.expected_recovery(with_spare, without, there)
    return Outlook(
        mtbf=mtbf,
        checkpoint=checkpoint,
        interval=interval,
        recovery=recovery,
        spare_there=there,
        goodput=reliability.goodput(mtbf, interval, checkpoint, recovery),
        goodput_without_spares=reliability.goodput(mtbf, interval, checkpoint, without),
    )
