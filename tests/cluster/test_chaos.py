"""A short run of `make chaos`. `make test-long` runs it for ten minutes. All promises must be kept."""

import random

import pytest

from muster.slurm.cluster.chaos import run_chaos
from muster.slurm.cluster.cluster import Cluster

pytestmark = pytest.mark.cluster

MINUTES = 1.0
FAULTS = 8
"""At least. From one fault to the next two idle cores take 5 to 6 s (a pause of 3.5 s on average, mending, a look at
all nodes, the fault itself). Busy cores took 16 s, so the test counts faults, not the time alone."""
STEPS = 150
"""Of each job: it ends, and is submitted anew, about once."""


def test_every_promise_is_kept(healthy: Cluster) -> None:
    """Two jobs and random faults. The faults differ in each run; the seed is printed."""
    seed = random.randrange(1_000_000)
    print(f"python -m muster.slurm.cluster.chaos --minutes {MINUTES:g} --seed {seed}")
    chaos = run_chaos(healthy, MINUTES, seed, print, STEPS, FAULTS)
    print(chaos.summary())
    assert chaos.counts.total() >= FAULTS
