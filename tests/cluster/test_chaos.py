"""A cut of `make chaos`: no promise is broken, whatever strikes when."""

import random

import pytest

from muster.slurm.cluster.chaos import play
from muster.slurm.cluster.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

MINUTES = 3.0
STEPS = 250
SLOWEST_S = 30.0
"""From one fault to the next on a slow machine: a pause of 3.5 s on average, then mending, looking at all nodes, the
fault itself and now and then a job's end, after which the next one gathers. Two idle cores take 5 to 6 s in all, busy
ones took 16: chaos that hardly strikes is none."""


def test_every_promise_is_kept(healthy: Cluster) -> None:
    """Two jobs, random faults for three minutes; other ones each time (the seed is printed)."""
    seed = random.randrange(1_000_000)
    print(f"python -m muster.slurm.cluster.chaos --minutes {MINUTES:g} --seed {seed}")
    chaos = play(healthy, MINUTES, seed, print, STEPS)
    print(chaos.summary())
    assert chaos.counts.total() >= 60 * MINUTES / SLOWEST_S
