"""`muster diagnose` on a real Slurm: links shaped with `tc tbf`, groups torn over leaves, earlier generations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from muster.slurm.testcluster.cluster import Cluster
from muster.slurm.testcluster.spec import LOGIN
from muster.slurm.testcluster.training import SLOW_STEPS, Training, TrainingSpec
from muster.slurm.testcluster.waiting import allowed, wait_until

pytestmark = pytest.mark.cluster

# No leaf of the shared cluster has four nodes: the tensor group is torn.
SETTINGS = (
    "parallelism.tensor = 4",
    'placement.tensor = "leaf"',
    "model.parameters = 1e9",
    'slurm.options = ["--nodelist=n[0-4]"]',
)
RATE, RATE_BYTES = "12mbit", 1.5e6
"""Far below what any two containers reach, on however busy a machine. A step waits 0.4 s more for its gradients."""


@contextmanager
def shaped(cluster: Cluster, node: str) -> Iterator[None]:
    """From now on the node sends slowly. It receives as before."""
    cluster.sh(node, f"tc qdisc add dev eth0 root tbf rate {RATE} burst 64kb latency 400ms")
    try:
        yield
    finally:
        cluster.sh(node, "tc qdisc del dev eth0 root")


def diagnose(cluster: Cluster, job: int, *options: str) -> dict[str, Any]:
    shown = cluster.exec(LOGIN, "muster", "diagnose", str(job), "--json", *options, user="alice", timeout=180).stdout
    found: dict[str, Any] = json.loads(shown)
    return found


def top(cluster: Cluster, job: int) -> str:
    """What `muster top JOB` writes on a terminal of 80 columns. A key is pressed once the screen before it is there."""
    drawn = f"/tmp/top-{job}"
    keys = "; ".join(
        f"while [ -e {drawn} ] && ! grep -qF '{words}' {drawn}; do sleep 0.1; done; printf {key}"
        for words, key in (("recoveries (v)", "n"), ("[n]nodes", "q"))
    )
    command = f"stty cols 80 rows 24; TERM=xterm-256color muster top {job}"
    script = f">{drawn}; ({keys}) | {{ script -qfec '{command}' {drawn} >/dev/null; cat {drawn}; rm {drawn}; }}"
    return cluster.exec(LOGIN, "bash", "-c", script, user="alice", timeout=allowed(60)).stdout


def test_a_torn_group_is_named_to_whom_the_job_belongs(healthy: Cluster) -> None:
    spec = TrainingSpec("diagnosed", nodes=4, spares=1, arguments=SLOW_STEPS, settings=SETTINGS)
    with Training(healthy, spec) as training:
        job = training.submit()
        training.wait_step(16)
        wait_until(lambda: bool(diagnose(healthy, job)["compute_s"]), 60, "ranks have reported their steps")
        found = diagnose(healthy, job)
        nodes = [training.node_of(rank) for rank in range(4)]
        (torn,) = found["torn_groups"]
        assert (torn["ranks"], torn["nodes"]) == ([0, 1, 2, 3], nodes)
        assert (torn["asked"], torn["found"]) == ("leaf", "any")
        assert {healthy.spec.leaf_of(node) for node in nodes} < set(torn["switches"])
        assert min(found["step_s"], found["compute_s"], found["predicted"]["step_s"]) > 0
        refused = healthy.exec(LOGIN, "muster", "diagnose", str(job), "--measure", user="bob", check=False)
        assert (refused.rc, "no such job, or not yours" in refused.stderr) == (64, True)
        wait_until(
            lambda: "host RAM\t" in healthy.muster(LOGIN, "status", str(job), user="alice"),
            60,
            "agents have reported the memory of their nodes",
        )
        drawn = top(healthy, job)
        for words in ("diagnosed", "generation 1", "host RAM", "recoveries (v)", "[n]nodes"):
            assert words in drawn, words
        training.cancel()
    wait_until(lambda: diagnose(healthy, job)["phase"] == "CANCELLED", 30, "the gang has ended")
    text = healthy.exec(LOGIN, "muster", "diagnose", str(job), user="alice").stdout
    assert "how fast it is now: it is CANCELLED, and no rank trains" in text
    assert re.search(r"its last generation, \d+, took ", text)


@pytest.mark.long
@pytest.mark.alone
def test_a_shaped_link_and_a_faster_generation_are_named(healthy: Cluster) -> None:
    spec = TrainingSpec("shaped", nodes=4, spares=1, arguments=SLOW_STEPS, settings=SETTINGS)
    with Training(healthy, spec) as training:
        job = training.submit()
        training.wait_step(48)
        fast = diagnose(healthy, job)
        training.kill_rank(0)
        training.wait_recovered(fast["generation"] + 1)
        slow_node = training.node_of(2)
        with shaped(healthy, slow_node):
            training.wait_step(training.steps(fast["generation"])[-1][0] + 48)
            slow = diagnose(healthy, job, "--measure")
            text = healthy.exec(LOGIN, "muster", "diagnose", str(job), user="alice").stdout
        named = slow["slow_links"][0]
        assert (named["nodes"], named["side"]) == ([slow_node], "sends"), slow["links"]
        assert named["bytes_per_s"] < 3 * RATE_BYTES
        assert f"SLOW: {slow_node} sends slowly" in text
        assert f"muster swap {job} {slow_node}" in text
        earlier = slow["earlier"]
        assert (earlier["job"], earlier["generation"]) == (job, fast["generation"])
        assert earlier["share"] == pytest.approx(earlier["step"] / slow["step_s"])
        assert earlier["share"] < 0.9
        assert slow["wait_s"] > fast["wait_s"]
        training.cancel()


@pytest.mark.long  # some hundreds of steps
def test_a_rank_that_is_stopped_for_most_of_the_time_is_named(healthy: Cluster) -> None:
    """All ranks share the cores of this host, so the times of steps scatter on each of them."""

    def slow_ranks() -> list[int]:
        view = json.loads(healthy.exec(LOGIN, "muster", "status", str(job), "--json", user="alice").stdout)
        return [rank["rank"] for rank in view["ranks"] if rank["slower_by"]]

    with Training(healthy, TrainingSpec("held-up", nodes=4, spares=0, arguments=SLOW_STEPS)) as training:
        job = training.submit()
        training.wait_step(40)
        node = training.node_of(2)
        healthy.slow_rank(node, 2)
        wait_until(slow_ranks, 300, "the rank is named")
        assert slow_ranks() == [2]
        events = healthy.exec(LOGIN, "muster", "events", str(job), user="alice").stdout
        assert f"rank 2 on {node} computes" in " ".join(events.split())
        training.cancel()


SHARDED = """
import time, torch
import torch.distributed as dist
from muster.checkpoint import Checkpoint

class Shard:
    "Twenty megabytes that no other rank has, and that change with each step."
    def __init__(self):
        self.data = torch.randn(5_000_000, generator=torch.Generator().manual_seed(dist.get_rank()))
    def state_dict(self):
        return {"data": self.data}
    def load_state_dict(self, state):
        self.data.copy_(state["data"])

dist.init_process_group("gloo")
torch.set_num_threads(1)
shard = Shard()
checkpoint = Checkpoint(per_rank=["shard"], shard=shard)
step = checkpoint.restore()
while True:
    step += 1
    dist.all_reduce(torch.ones(1))
    shard.data.add_(1.0)
    checkpoint.step(step)
    time.sleep(0.5)
"""


@pytest.mark.long
def test_a_copy_to_a_buddy_over_a_shaped_link_is_named_without_a_measurement(healthy: Cluster) -> None:
    folder = "/shared/sharded"
    job_toml = f"""
name = "sharded"
nodes = 4
command = ["python3", "{folder}/train.py"]
run_dir = "{folder}"
slurm.options = ["--nodelist=n[0-3]"]
"""
    healthy.sh(LOGIN, f"mkdir -p {folder}; cat >{folder}/train.py <<'EOF'\n{SHARDED}\nEOF", user="alice")
    healthy.sh(LOGIN, f"cat >{folder}/job.toml <<'EOF'\n{job_toml}\nEOF", user="alice")
    job = int(healthy.exec(LOGIN, "muster", "submit", f"{folder}/job.toml", user="alice").stdout)

    def copies() -> dict[tuple[str, str], float]:
        links = diagnose(healthy, job)["links"]
        return {(one["from"], one["to"]): one["bytes_per_s"] for one in links if not one["requested"]}

    wait_until(lambda: len(copies()) == 4, 120, "each node has copied its shard to its buddy")
    (buddy,) = [to for sender, to in copies() if sender == "n1"]
    with shaped(healthy, "n1"):
        wait_until(lambda: copies()["n1", buddy] < 3 * RATE_BYTES, 120, "a copy went over the shaped link")
        found = diagnose(healthy, job)
        text = healthy.exec(LOGIN, "muster", "diagnose", str(job), user="alice").stdout
    assert [(one["nodes"], one["side"]) for one in found["slow_links"]] == [(["n1", buddy], "between")], found["links"]
    assert f"n1 to {buddy}: find the end that is slow: muster diagnose {job} --measure" in text
    healthy.exec(LOGIN, "muster", "cancel", str(job), user="alice")
