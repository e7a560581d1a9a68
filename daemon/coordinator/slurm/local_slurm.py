"""The replacement of Slurm for `muster run --local`: a cluster in memory, made of the agents that attach.

One workstation has no queue. The "nodes" are agents that one command started, and only the agents know their job.
"""

from __future__ import annotations

from collections.abc import Sequence

from muster.daemon.host import clock
from muster.slurm.client.fake.fake_cluster import FakeCluster
from muster.slurm.client.fake.fake_slurm import FakeSlurm


class LocalSlurm(FakeSlurm):
    """A FakeSlurm that learns its jobs, and nodes beside `nodes`, from the agents' hello messages."""

    def __init__(self, nodes: Sequence[str] = ()) -> None:
        """`nodes`: each job has them from its first agent on. An agent may come late on a busy machine; without its
        node it would look as if the job had lost it."""
        super().__init__(FakeCluster((), now=clock.wall))
        self._nodes = tuple(nodes)

    def add_node(self, job: int, node: str, uid: int) -> None:
        """Add `node`, on which an agent of `uid` runs for `job`. Idempotent."""
        for name in (*self._nodes, node):
            self.cluster.add_running_node(job, name, uid)
