"""What the peers' logs and runs come to, without a cluster."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOG = """\
start after step 0 of 8 ranks at 100.000000
rank 3 on n3 in process 33
rank 0 on n0 in process 30
step 1 loss 5.5000 0.200 s at 101.000000
step 2 loss 5.4000 0.200 s at 102.000000
step 3 loss 5.3000 0.2
start after step 1 of 9 ranks at 120.000000
rank 0 on n1 in process 40
rank 3 on n4 in process 43
step 2 loss 5.4000 0.200 s at 125.500000
step 3 loss 5.3000 0.200 s at 126.000000
"""


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    """The package, which is no part of the distribution, without the checkout on the import path."""
    if "benchmarks" not in sys.modules:
        folder = ROOT / "benchmarks"
        spec = importlib.util.spec_from_file_location(
            "benchmarks", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
    import benchmarks.peers.measure

    return benchmarks.peers


def test_a_recovery_is_the_first_step_of_the_next_start(peers: ModuleType) -> None:
    runs = peers.steplog.parse(LOG)
    assert [len(steps) for _, steps in runs] == [2, 2]  # the torn line is left out
    found = peers.steplog.recovery_after(runs, fault=102.5)
    assert (found.after_s, found.started_s, found.redone, found.ranks) == (23.0, 17.5, 1, 9)


def test_the_newest_word_on_where_a_rank_is_counts(peers: ModuleType) -> None:
    assert peers.steplog.host_of(LOG, 3) == "n4"
    assert peers.steplog.process_of(LOG, 0) == ("n1", "40")


def test_steps_of_the_old_start_and_a_start_without_a_step_are_no_recovery(peers: ModuleType) -> None:
    runs = peers.steplog.parse(LOG)
    assert peers.steplog.recovery_after(runs[:1], fault=101.5) is None
    assert peers.steplog.recovery_after([runs[0], (runs[1][0], [])], fault=102.5) is None


def test_a_run_without_recovery_counts_as_endless(peers: ModuleType) -> None:
    run, recovery = peers.measure.Run, peers.steplog.Recovery
    good = [run(recovery(seconds, 1.0, redone, 8)) for seconds, redone in ((10.0, 3), (20.0, 7), (12.0, 0))]
    cell = peers.measure.summarize(good, 3, "about.")
    assert (cell["median_s"], cell["worst_s"], cell["steps_redone"], cell["note"]) == (12.0, 20.0, 7, "about.")
    cell = peers.measure.summarize([good[0], run(None, "no step")], 5, "about.")
    assert (cell["median_s"], cell["worst_s"], cell["recovered"], cell["runs"]) == (None, None, 1, 2)
    assert cell["note"] == "about. Measured: no step."


def test_runs_that_there_was_no_time_for_are_told(peers: ModuleType) -> None:
    cell = peers.measure.summarize([], 5, "about.")
    assert cell["median_s"] is None
    assert "0 of 5 runs" in cell["note"]


def test_every_peer_has_a_name_of_its_own_and_settings_that_a_cluster_takes(peers: ModuleType) -> None:
    from muster.slurm.testcluster.spec import ClusterSpec

    names = [peer.name for peer in peers.catalogue.PEERS]
    assert len(set(names)) == len(names) == 6
    for peer in peers.catalogue.PEERS:
        conf = ClusterSpec(**peer.settings).files()["slurm.conf"]
        assert f"SlurmdTimeout={peer.settings['slurmd_timeout']}" in conf
        assert {*peer.notes, *peer.faults} <= {fault.name for fault in peers.measure.FAULTS}


def test_a_start_is_compared_without_the_queue(peers: ModuleType) -> None:
    from benchmarks import bench_start

    muster, bare = bench_start.Figures(), bench_start.Figures()
    for queue in (0.1, 0.9):
        muster.add({"": 10.0, "submit": 10.5, "queue": 10.5 + queue, "gather": 12.5 + queue, "step": 13.0 + queue})
        bare.add({"": 10.0, "submit": 10.1, "queue": 11.1 - queue, "step": 13.1 - queue})
    assert muster.phases["gather"] == pytest.approx([2.0, 2.0])
    assert bare.total == pytest.approx([3.0, 2.2])
    found = {"muster, python": muster, "python": bare}
    assert bench_start.above("muster, python", found) == pytest.approx(0.9)
    assert bench_start.above("python", found) is None
