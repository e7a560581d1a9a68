"""The alternatives without Muster, Slurm's requeue and torchrun, measured with the same faults on the same cluster."""

from benchmarks.peers.measure import measure_peers

__all__ = ["measure_peers"]
