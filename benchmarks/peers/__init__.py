"""What a user has without Muster, struck by the same faults in the same cluster: Slurm's requeue and torchrun."""

from benchmarks.peers.measure import measure_peers

__all__ = ["measure_peers"]
