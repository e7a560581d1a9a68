"""The cost model's ranking of placements agrees with gloo's all-reduces, timed over links shaped with `tc tbf`.

Eight nodes in two pods of two leaves of two nodes each. Each node sends at another rate into its own leaf, into its own
pod, and beyond. Each placement is one gang whose tensor, context and data groups sum a buffer, one kind after the
other, as in a step. The model predicts the time from the rates alone.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest

from muster.fabric.groups.axes import Axes
from muster.fabric.groups.rank_groups import GroupKind, rank_groups
from muster.fabric.model.fabric import Fabric
from muster.fabric.model.level import Level
from muster.fabric.model.link import Link
from muster.fabric.placement.maps.rank_map import place
from muster.fabric.placement.node_groups import NodeGroup, node_groups
from muster.fabric.placement.step_time import step_seconds
from muster.fabric.placement.weights import ring_all_reduce
from muster.fabric.sources.nesting import NodeSet, fabric_of
from muster.fabric.sources.tiers import Tiers
from muster.slurm.testcluster.cluster import Cluster
from muster.slurm.testcluster.spec import ClusterSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.alone]

NODES = [f"n{number}" for number in range(8)]
MBIT = {Level.LEAF: 400, Level.POD: 100, Level.ANY: 25}
"""What one node sends over each tier. The fastest is far below what a busy machine moves between containers."""
LATENCY_S = 2e-4
AXES = Axes(tensor=2, context=2, data=2)
KINDS = (GroupKind.TENSOR, GroupKind.CONTEXT, GroupKind.DATA)
BYTES = {GroupKind.TENSOR: 2_000_000, GroupKind.CONTEXT: 1_000_000, GroupKind.DATA: 500_000}
"""Of one buffer. DATA groups have the context axis, too: four ranks."""
PLACEMENTS = 12
TRIED = 4_000
"""Random placements from which these are taken: most of them cross the slowest tier with everything."""
REPEATS = 3
CLEAR = 1.1
"""Two placements whose predictions differ by less are taken for equal."""
PORT = 29_511

RANK = """
import datetime, json, sys, time
import torch, torch.distributed as dist
node, plan = sys.argv[1], json.load(open("/shared/plan.json"))
store = dist.TCPStore(plan["address"], plan["port"], len(plan["nodes"]), node == plan["nodes"][0],
                      timeout=datetime.timedelta(seconds=120), use_libuv=False)
for number, nodes in enumerate(plan["placements"]):
    rank = nodes.index(node)
    dist.init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=len(nodes))
    kinds = []
    for size, groups in plan["kinds"]:
        handles = [dist.new_group(group) for group in groups]
        kinds.append((torch.ones(size // 4), next(h for h, group in zip(handles, groups) if rank in group)))
    times = []
    for repeat in range(plan["repeats"] + 1):
        dist.barrier()
        started = time.monotonic()
        for buffer, group in kinds:
            dist.all_reduce(buffer, group=group)
            dist.barrier()
        times.append(time.monotonic() - started)
    if rank == 0:
        store.set(f"time {number}", json.dumps(times[1:]))
    dist.barrier()
    dist.destroy_process_group()
if node == plan["nodes"][0]:
    found = [json.loads(store.get(f"time {number}")) for number in range(len(plan["placements"]))]
    open("/shared/times.json.new", "w").write(json.dumps(found))
    import os
    os.rename("/shared/times.json.new", "/shared/times.json")
"""


def leaf(node: str) -> int:
    return int(node[1:]) // 2


def pod(node: str) -> int:
    return int(node[1:]) // 4


@pytest.fixture
def network(suite: str) -> Iterator[Cluster]:
    """Eight nodes without daemons, whose links are shaped."""
    with Cluster.up(ClusterSpec(nodes=8, leaves=4, daemons=False, suite=suite)) as cluster:
        for node in NODES:
            cluster.sh(node, shape(cluster, node))
        yield cluster


def shape(cluster: Cluster, node: str) -> str:
    """A script: what the node sends is divided by tier, and each part has a token bucket of its own."""
    lines = ["set -e", "tc qdisc add dev eth0 root handle 1: htb"]
    for band, level in enumerate(MBIT, start=1):
        lines.append(f"tc class add dev eth0 parent 1: classid 1:{band} htb rate 10gbit quantum 60000")
        rate = f"tbf rate {MBIT[level]}mbit burst 32kb latency 2s"
        lines.append(f"tc qdisc add dev eth0 parent 1:{band} handle {band}0: {rate}")
    for other in NODES:
        if other != node:
            band = 1 if leaf(other) == leaf(node) else 2 if pod(other) == pod(node) else 3
            match = f"match ip dst {cluster.address(other)}/32"
            lines.append(f"tc filter add dev eth0 parent 1: protocol ip prio 1 u32 {match} flowid 1:{band}")
    return "\n".join(lines)


def measured(cluster: Cluster, placements: Sequence[Sequence[str]]) -> list[float]:
    """Seconds of one step's all-reduces in each placement: the median of its repeats."""
    kinds = [(BYTES[kind], rank_groups(AXES, kind)) for kind in KINDS]
    plan = {
        "address": cluster.address(NODES[0]),
        "port": PORT,
        "nodes": NODES,
        "placements": placements,
        "kinds": kinds,
        "repeats": REPEATS,
    }
    (cluster.shared / "plan.json").write_text(json.dumps(plan))
    (cluster.shared / "rank.py").write_text(RANK)
    times = cluster.shared / "times.json"
    ranks = [cluster.popen(node, "python3", "/shared/rank.py", node) for node in NODES]
    try:
        wait_until(lambda: times.exists() or any(rank.poll() for rank in ranks), 240, "the all-reduces are timed")
    finally:
        said = [cluster.kill_and_read(rank) for rank in ranks]
    assert times.exists(), said
    return [statistics.median(repeats) for repeats in json.loads(times.read_text())]


def ranking(values: list[float]) -> list[float]:
    """Ranks from 0, the mean one where values are equal."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


def different(fabric: Fabric, groups: Sequence[NodeGroup]) -> list[tuple[str, ...]]:
    """The placement that Muster would choose, and others whose predictions are spread over all that there are."""
    chance = random.Random(7)
    best = place(fabric, groups, frozenset(NODES), len(NODES)).seats
    by_time = {step_seconds(fabric, groups, best): best}
    for _ in range(TRIED):
        seats = tuple(chance.sample(NODES, len(NODES)))
        by_time.setdefault(step_seconds(fabric, groups, seats), seats)
    times = sorted(by_time)
    wanted = [times[0] + (times[-1] - times[0]) * at / (PLACEMENTS - 1) for at in range(PLACEMENTS)]
    nearest = {min(times, key=lambda time: abs(time - one)) for one in wanted}
    return [best, *(by_time[time] for time in sorted(nearest) if by_time[time] != best)]


def test_the_predicted_order_of_placements_is_the_measured_one(network: Cluster) -> None:
    sets = [NodeSet(frozenset(n for n in NODES if at(n) == number), f"{at.__name__}{number}")
            for at in (leaf, pod) for number in {at(n) for n in NODES}]  # fmt: skip
    tiers = Tiers({level: Link(LATENCY_S, mbit * 1e6 / 8) for level, mbit in MBIT.items()})
    fabric = fabric_of([*sets, NodeSet(frozenset(NODES), "spine")], NODES, tiers)
    sizes = {kind: len(rank_groups(AXES, kind)[0]) for kind in KINDS}
    groups = node_groups(AXES, 1, {kind: ring_all_reduce(sizes[kind], BYTES[kind]) for kind in KINDS})
    placements = different(fabric, groups)
    predicted = [step_seconds(fabric, groups, seats) for seats in placements]
    found = measured(network, placements)
    clear = [(a, b) for a, b in combinations(range(len(placements)), 2)
             if max(predicted[a], predicted[b]) > CLEAR * min(predicted[a], predicted[b])]  # fmt: skip
    agreed = sum((predicted[a] < predicted[b]) == (found[a] < found[b]) for a, b in clear) / len(clear)
    spearman = statistics.correlation(ranking(predicted), ranking(found))
    table = [f"{p:.3f} s predicted, {m:.3f} s measured: {' '.join(s)}"
             for p, m, s in sorted(zip(predicted, found, placements, strict=True))]  # fmt: skip
    words = "\n".join((f"Spearman {spearman:.3f}; {agreed:.1%} of {len(clear)} clear pairs agree", *table))
    print(words)
    assert len(clear) > 20, words
    assert spearman > 0.9, words
    assert agreed > 0.95, words
    assert found[0] < 1.1 * min(found), words
