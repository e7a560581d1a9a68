"""Node checks on a real Slurm: `muster check`, the preflight of a job, and the check after which Muster resumes a node.
numpy on one node is wrong or hangs, and PyTorch on another one can't be imported.

What stands in for the broken node is its library: a file that Python reads at each start, on that node alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from muster.slurm.testcluster.cluster import Cluster
from muster.slurm.testcluster.spec import CONTROLLER, LOGIN, POLICY
from muster.slurm.testcluster.training import FATAL_XID_LINE, SLOW_STEPS, Training, TrainingSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = pytest.mark.cluster

HOOK = """
import importlib.machinery, os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "numpy":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            class Broken(module.ndarray):
                def __matmul__(self, other):
                    product = module.asarray(self) @ module.asarray(other)
                    {what}
            whole = module.arange
            module.arange = lambda *args, **kwargs: whole(*args, **kwargs).view(Broken)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""
COMPUTES_WRONGLY = HOOK.replace("{what}", "product[17, 4] += 1; return product")
HANGS = HOOK.replace("{what}", "os.kill(os.getpid(), signal.SIGSTOP)")
NO_TORCH = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ImportError("libtorch_cpu.so: file too short")

sys.meta_path.insert(0, Finder())
"""
WHERE = "python3 -c \"import sysconfig; print(sysconfig.get_path('purelib'))\""
LAY_OUT = f"dir=$({WHERE}); cat >$dir/broken_library.py; echo import broken_library >$dir/broken_library.pth"
MEND = f"dir=$({WHERE}); rm -f $dir/broken_library.py $dir/broken_library.pth"


@contextmanager
def broken_library(cluster: Cluster, node: str, hook: str) -> Iterator[None]:
    """From now on each Python program on the node runs this before it imports anything else."""
    cluster.exec(node, "bash", "-c", LAY_OUT, stdin=hook.encode())
    try:
        yield
    finally:
        cluster.sh(node, MEND)


def check(cluster: Cluster, *words: str) -> tuple[int, list[dict[str, object]]]:
    """Runs `muster check --json` on the login node. Returns its status and its lines."""
    done = cluster.exec(LOGIN, "muster", "check", "--json", *words, user="alice", timeout=180, check=False)
    return done.rc, [json.loads(line) for line in done.stdout.splitlines()]


def test_a_check_of_nodes_finds_the_one_that_computes_wrongly_and_the_one_that_hangs(healthy: Cluster) -> None:
    status, lines = check(healthy, "n[0-7]")
    nodes = {line["node"]: line["outcome"] for line in lines if "node" in line}
    assert nodes == {f"n{number}": "passed" for number in range(8)}, lines
    assert len([line for line in lines if "first" in line]) == 12, lines
    with broken_library(healthy, "n1", COMPUTES_WRONGLY), broken_library(healthy, "n2", HANGS):
        status, lines = check(healthy, "n[0-3]")
        nodes = {line["node"]: line["outcome"] for line in lines if "node" in line}
        assert (status, nodes) == (1, {"n0": "passed", "n1": "wrong", "n2": "silent", "n3": "passed"}), lines


@pytest.mark.long
@pytest.mark.alone
def test_a_slow_link_of_one_node_is_found(healthy: Cluster) -> None:
    healthy.sh("n3", "tc qdisc add dev eth0 root tbf rate 20mbit burst 256kb latency 400ms")
    try:
        shown = healthy.exec(LOGIN, "muster", "check", "n[0-5]", user="alice", timeout=180, check=False)
    finally:
        healthy.sh("n3", "tc qdisc del dev eth0 root")
    assert shown.rc == 1
    assert "slow node: n3" in shown.stdout, shown.stdout


def test_spares_take_the_seats_of_nodes_that_fail_their_check_before_the_first_step(healthy: Cluster) -> None:
    """One computes wrongly. PyTorch is broken on the other one, whose check without GPUs does not use it."""
    settings = ("preflight = true", "[slurm]", 'options = ["--nodelist=n[0-4]"]')
    spec = TrainingSpec("preflight", nodes=3, spares=2, arguments=SLOW_STEPS, settings=settings)
    wrong, no_torch = broken_library(healthy, "n1", COMPUTES_WRONGLY), broken_library(healthy, "n2", NO_TORCH)
    with wrong, no_torch, Training(healthy, spec) as training:
        job = training.submit()
        training.wait_step(5)
        assert training.generation == 1
        assert {training.node_of(rank) for rank in range(3)} == {"n0", "n3", "n4"}
        events = healthy.muster(LOGIN, "events", str(job), user="alice")
        words = {
            "n1": "wrong: a matrix product differs from the known one",
            "n2": "failed: torch can't be imported: ImportError: libtorch_cpu.so: file too short",
        }
        for node, found in words.items():
            assert f"the node check of {node}: {found}" in events
            assert f"{node} is removed from the gang: {node} has failed its node check" in events
        nodes = healthy.muster(LOGIN, "nodes", "-v", user="alice")
        rows = {line.split()[0]: line for line in nodes.splitlines()}
        assert "FIT" in rows["n1"]
        assert f"job {job}" in rows["n1"]
        assert "GFLOP/s" in rows["n0"]


# --- resume after a check --------------------------------------------------------------------------------------------

RESUMES = POLICY.replace("[limits]", "[limits]\nresume_after_check = true")
MUSTERS_REASON = "muster: [node] Xid 79"
ASKED = "the coordinator asks for a check of this node"


@pytest.fixture
def resuming(healthy: Cluster) -> Iterator[Cluster]:
    """The cluster of a site that has asked Muster to resume the nodes that it has drained."""
    _use_policy(healthy, RESUMES)
    yield healthy
    _use_policy(healthy, POLICY)


def _use_policy(cluster: Cluster, text: str) -> None:
    (cluster.folder / "muster" / "policy.toml").write_text(text)
    cluster.restart_coordinator()
    wait_until(lambda: set(verdicts(cluster)) == set(cluster.nodes), 60, "every musterd is attached again")


def verdicts(cluster: Cluster) -> dict[str, str]:
    """The health of each node whose musterd is attached."""
    shown = cluster.exec(LOGIN, "muster", "nodes", "--json", user="alice", check=False).stdout
    nodes = [json.loads(line) for line in shown.splitlines()]
    return {node["node"]: node["verdict"] for node in nodes if node.get("musterd_attached")}


def in_slurm(cluster: Cluster, node: str) -> str:
    return cluster.sh(CONTROLLER, f"scontrol show node {node}")


def decisions(cluster: Cluster) -> str:
    return cluster.muster(CONTROLLER, "events")


def drain_by_hand(cluster: Cluster, node: str, reason: str) -> None:
    cluster.exec(CONTROLLER, "scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}")


def wait_drained(cluster: Cluster, node: str, reason: str = MUSTERS_REASON) -> None:
    def drained() -> bool:
        shown = in_slurm(cluster, node)
        return "DRAIN" in shown and f"Reason={reason}" in shown

    wait_until(drained, 60, f"{node} is drained: {reason}")


def wait_resumed(cluster: Cluster, node: str) -> None:
    def resumed() -> bool:
        return "DRAIN" not in in_slurm(cluster, node) and verdicts(cluster).get(node) == "FIT"

    wait_until(resumed, 120, f"{node} is resumed")


def test_a_node_that_muster_drained_is_resumed_and_one_of_an_administrator_is_not(resuming: Cluster) -> None:
    """An administrator has drained two nodes, one of them in the second in which it fails."""
    bad, healthy, faulty = "n1", "n8", "n9"
    for node in (healthy, faulty):
        drain_by_hand(resuming, node, "new disk")
    resuming.kmsg(faulty, FATAL_XID_LINE)
    wait_until(lambda: verdicts(resuming).get(faulty) == "UNFIT", 30, f"{faulty} is UNFIT")
    settings = ("[slurm]", 'options = ["--nodelist=n[0-2]"]')
    with Training(resuming, TrainingSpec("resume", nodes=2, spares=1, arguments=SLOW_STEPS, settings=settings)) as one:
        job = one.submit()
        one.wait_step(5)
        assert {one.node_of(rank) for rank in range(2)} == {"n0", bad}
        resuming.kmsg(bad, FATAL_XID_LINE)
        assert one.wait_left(bad)["nodes_out"] == [bad]
        wait_resumed(resuming, bad)
        events = decisions(resuming)
        words = f"resume {bad}, if its drain still has this reason: {MUSTERS_REASON}"
        assert events.index(f"the node check of {bad}: musterd checks whether to resume") < events.index(words), events
        assert bad not in resuming.sh(CONTROLLER, f"squeue -h -j {job} -o %N | xargs scontrol show hostnames").split()
    wait_drained(resuming, healthy, "new disk")
    for node in (healthy, faulty):
        assert "DRAIN" in in_slurm(resuming, node)
        assert ASKED not in resuming.logs(node, "musterd")


def test_a_node_whose_check_fails_stays_drained_until_it_is_repaired_and_boots(resuming: Cluster) -> None:
    """An administrator writes another reason for a second one, which stays drained. So does the first one when it fails
    again within a day."""
    bad, kept, other = "n5", "n6", "n7"
    with broken_library(resuming, bad, COMPUTES_WRONGLY), broken_library(resuming, kept, COMPUTES_WRONGLY):
        for node in (bad, kept):
            resuming.kmsg(node, FATAL_XID_LINE)
        for node in (bad, kept):
            found = f"the node check of {node}: musterd checks whether to resume the node: wrong"
            wait_until(lambda found=found: found in decisions(resuming), 120, f"the check of {node} has failed")
            wait_drained(resuming, node)
        drain_by_hand(resuming, kept, "for the vendor")
    for node in (bad, kept):
        resuming.crash(node)
        resuming.start_node(node)
    wait_resumed(resuming, bad)
    resuming.kmsg(bad, FATAL_XID_LINE)
    wait_drained(resuming, bad)
    resuming.kmsg(other, FATAL_XID_LINE)
    wait_drained(resuming, other)
    wait_resumed(resuming, other)
    wait_drained(resuming, bad)
    wait_drained(resuming, kept, "for the vendor")
    assert [resuming.logs(node, "musterd").count(ASKED) for node in (bad, other)] == [2, 1]
