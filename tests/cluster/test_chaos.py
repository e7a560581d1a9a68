"""A cut of `make chaos`: no promise is broken, whatever strikes when."""

import random

import pytest

from muster.slurm.cluster.chaos import play
from muster.slurm.cluster.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

MINUTES = 3.0
STEPS = 250


def test_every_promise_is_kept(healthy: Cluster) -> None:
    """Two jobs, random faults for three minutes; other ones each time (the seed is printed)."""
    seed = random.randrange(1_000_000)
    print(f"python -m muster.slurm.cluster.chaos --minutes {MINUTES:g} --seed {seed}")
    chaos = play(healthy, MINUTES, seed, print, STEPS)
    print(chaos.counts)
    assert chaos.counts.total() >= 5
