"""The shared cluster: started once for the whole run, mended before each test that asks for `healthy`.

`make test` runs the tests in three processes, each with its own cluster: much of the time is Slurm's own waiting.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from muster.slurm.image.engine import EngineError
from muster.slurm.image.recipe import SUITES
from muster.slurm.testcluster.cluster import Cluster
from muster.slurm.testcluster.diagnostics import diagnostics
from muster.slurm.testcluster.spec import ClusterSpec

_CLUSTER = pytest.StashKey[Cluster]()


def pytest_configure() -> None:
    """Give every wait more time than even a busy machine takes: a test fails by what it sees, not by when."""
    os.environ.setdefault("MUSTER_PATIENCE", "5")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--suite trixie`: the same tests on an older Slurm."""
    parser.addoption("--suite", default="forky", choices=SUITES, help="Debian: Slurm 26.05 or 24.11")


@pytest.fixture(scope="session")
def suite(pytestconfig: pytest.Config) -> str:
    """Debian of all clusters of this run."""
    return str(pytestconfig.getoption("--suite"))


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config, suite: str) -> Iterator[Cluster]:
    """A cluster of 10 nodes; a missing engine is a failure that says what to install, never a skip."""
    try:
        spec = ClusterSpec(nodes=10, requeue_delay=1, metrics=True, suite=suite)
        one = Cluster.up(spec)
    except EngineError as error:
        pytest.fail(f"the cluster did not start: {error}", pytrace=False)
    with one:
        pytestconfig.stash[_CLUSTER] = one
        yield one


@pytest.fixture
def healthy(cluster: Cluster) -> Cluster:
    """The shared cluster with no job in it and every node idle."""
    cluster.restore_all()
    return cluster


@pytest.fixture
def other_settings(healthy: Cluster) -> Iterator[Cluster]:
    """The cluster with Slurm settings that a test may change. They are restored afterwards."""
    spec = healthy.spec
    yield healthy
    healthy.reconfigure(spec)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Add to a failure what the cluster shows: the nodes, the queue, the controller's logs, the newest jobs' output."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.failed and report.when == "call" and _CLUSTER in item.config.stash:
        report.sections.append(("cluster", diagnostics(item.config.stash[_CLUSTER], lines=30, jobs=3)))
