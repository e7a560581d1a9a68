"""The command lines of the cluster tool and the demo: help, and what they say of errors. No container is started."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from muster.slurm.image.engine import EngineError
from muster.slurm.testcluster import demo
from muster.slurm.testcluster.__main__ import main
from muster.slurm.testcluster.chaos.faults import FaultInjector
from muster.slurm.testcluster.registry import clusters_dir
from muster.slurm.testcluster.spec import ClusterSpec

FAULTS = ("crash", "hardware", "kmsg", "throttle", "gpu-ecc", "slow-rank", "link-down", "ecc")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The record of a cluster of two nodes that does not run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = clusters_dir() / "paper"
    folder.mkdir(parents=True)
    saved = {"spec": ClusterSpec(nodes=2).to_json(), "subnet": "10.0.0"}
    (folder / "cluster.json").write_text(json.dumps(saved))
    return "paper"


def test_the_help_lists_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    listed = capsys.readouterr().out
    assert [verb for verb in FAULTS if f"\n    {verb} " not in listed] == []


@pytest.mark.parametrize("verb", FAULTS)
def test_each_fault_has_help_of_its_own(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([verb, "--help"])
    assert end.value.code == 0
    assert "node" in capsys.readouterr().out


@pytest.mark.parametrize("host", ["n2", "login", "ctl"])
@pytest.mark.parametrize(
    "words",
    [
        ("crash",),
        ("kmsg", "a line"),
        ("throttle", "0"),
        ("gpu-ecc", "0"),
        ("slow-rank", "0"),
        ("ecc",),
        ("hardware", "eight"),
    ],
)
def test_a_fault_of_a_host_that_is_no_node_names_the_nodes(
    words: tuple[str, ...], host: str, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *others = words
    assert main([verb, "--name", cluster, host, *others]) == 1
    assert capsys.readouterr().err == f"cluster: {host!r} is not a node of cluster paper (nodes: n0 n1)\n"


def test_chaos_draws_from_every_fault_of_hardware() -> None:
    drawn = {
        action.__name__.strip("_") for action, weight, _ in FaultInjector.__new__(FaultInjector)._actions() if weight
    }
    assert drawn >= {"throttle", "gpu_ecc", "memory_error", "link_down", "slow_rank", "xid"}


def test_a_negative_rank_is_an_error(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slow-rank", "--name", cluster, "n0", "-1"]) == 1
    assert capsys.readouterr().err == "cluster: rank -1: ranks count from 0\n"


def test_the_demo_names_the_load_only_where_something_came_too_late() -> None:
    late = TimeoutError('demo: RUNNING not within 120 s: {"phase": "PENDING"}')
    assert re.fullmatch(r"demo: RUNNING not within 120 s\. Load of this machine: \d+, CPUs: \d+", demo._words(late))
    assert demo._words(EngineError("a cluster 'demo' already exists")) == "a cluster 'demo' already exists"
