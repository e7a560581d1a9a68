"""Slurm's stand-in for `muster run --local`: a cluster in memory, made up of whoever attaches.

There is no queue on one workstation. The "nodes" are agents that one command started; what they say of their job is
all there is to know.
"""

from __future__ import annotations

from muster.daemon.host import clock
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm


class LocalSlurm(FakeSlurm):
    """A FakeSlurm whose jobs and nodes are learned from agents' greetings."""

    def __init__(self) -> None:
        super().__init__(FakeCluster((), now=clock.wall))

    def meet(self, job: int, node: str, uid: int) -> None:
        """An agent of `uid` on `node` works for `job`; twice changes nothing."""
        self.cluster.add_running_node(job, node, uid)
