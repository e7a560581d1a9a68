"""Waiting for a job of the test cluster: what comes, what does not come in time, and what can't come any more."""

from __future__ import annotations

import threading

import pytest

from muster.slurm.image.engine import Engine
from muster.slurm.testcluster.cluster import Cluster
from muster.slurm.testcluster.spec import ClusterSpec
from muster.slurm.testcluster.training import Training, TrainingSpec

FOREVER_S = 1e6


@pytest.fixture
def training() -> Training:
    """A job of which a test says what is seen."""
    return Training(Cluster(Engine("none"), "none", ClusterSpec(), "10.0.0.0/24"), TrainingSpec("job"))


def test_a_view_that_comes_ends_the_wait(training: Training) -> None:
    views = ({"step": "3"}, {"step": "7"}, {"step": "9", "final": True})
    threading.Thread(target=lambda: [training._see(view) for view in views]).start()
    assert training.wait_final(FOREVER_S)["step"] == "9"


def test_nothing_is_waited_for_once_the_job_is_over(training: Training) -> None:
    training._see({"step": "3", "final": True})
    assert training.wait_step(3, FOREVER_S)["step"] == "3"
    with pytest.raises(TimeoutError, match="job: step 4 does not come, the job is over"):
        training.wait_step(4, FOREVER_S)
    with pytest.raises(TimeoutError, match="a first step without n2 does not come"):
        training.wait_left("n2")


def test_a_wait_that_is_too_long_names_the_newest_view(training: Training) -> None:
    training._see({"step": "3"})
    with pytest.raises(TimeoutError, match=r'step 4 not within 0 s: \{"step": "3"\}'):
        training.wait_step(4, 0.0)
