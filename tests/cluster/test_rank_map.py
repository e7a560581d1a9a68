"""Ranks follow the network: groups that communicate most are on one leaf, at the start and after swaps."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from muster.slurm.testcluster.cluster import Cluster
from muster.slurm.testcluster.hardware.pretended_host import CROSSED
from muster.slurm.testcluster.spec import CONTROLLER, LOGIN, ClusterSpec
from muster.slurm.testcluster.training import FATAL_XID_LINE, SLOW_STEPS, Training, TrainingSpec
from muster.slurm.testcluster.waiting import wait_until

pytestmark = pytest.mark.cluster

TELL = (
    "import json, os, socket, time\n"
    "starts = ('RANK', 'SLURM_', 'MUSTER_', 'CUDA_', 'NCCL_')\n"
    "told = {name: text for name, text in os.environ.items() if name.startswith(starts)}\n"
    "told['node'] = socket.gethostname()\n"
    "told['hosts'] = open(os.environ['MUSTER_HOSTFILE']).read()\n"
    "path = f\"{os.environ['MUSTER_RUN_DIR']}/told-{os.environ['MUSTER_GENERATION']}-{os.environ['RANK']}\"\n"
    "open(path + '.new', 'w').write(json.dumps(told))\n"
    "os.rename(path + '.new', path)\n"
    "time.sleep(600)\n"
)
"""The script of ranks that tell what they were told."""


def leaves_of_groups(cluster: Cluster, nodes: Sequence[str], size: int) -> list[set[str]]:
    """The leaf switches of each group of `size` consecutive nodes."""
    return [{cluster.spec.leaf_of(node) for node in nodes[at : at + size]} for at in range(0, len(nodes), size)]


def test_tensor_groups_stay_on_one_leaf_when_node_0_is_lost(healthy: Cluster) -> None:
    settings = ("parallelism.tensor = 2", 'slurm.options = ["--nodelist=n[0-4,7]"]')
    spec = TrainingSpec("packed", nodes=4, spares=2, arguments=SLOW_STEPS, settings=settings)
    with Training(healthy, spec) as training:
        training.submit()
        training.wait_step(3)
        before = [training.node_of(rank) for rank in range(4)]
        assert [len(leaves) for leaves in leaves_of_groups(healthy, before, 2)] == [1, 1]
        # Three of the nodes are on the leaf s0. Two of them carry one group, and the third is the spare for it.
        lost = next(node for node in before if healthy.spec.leaf_of(node) == "s0")
        healthy.crash(lost)
        training.wait_left(lost)
        after = [training.node_of(rank) for rank in range(4)]
        assert [len(leaves) for leaves in leaves_of_groups(healthy, after, 2)] == [1, 1]
        assert sum(one != other for one, other in zip(before, after, strict=True)) == 1
        training.cancel()


def test_a_group_that_is_torn_over_leaves_is_named_before_the_first_step(healthy: Cluster) -> None:
    settings = ("parallelism.tensor = 2", 'slurm.options = ["--nodelist=n0,n9"]')
    with Training(
        healthy, TrainingSpec("torn", nodes=2, spares=0, arguments=SLOW_STEPS, settings=settings)
    ) as training:
        job = training.submit()
        training.wait_step(1)
        words = "tensor groups of 2 nodes: 1 of 1 spans 2 leaves"
        status = healthy.exec(LOGIN, "muster", "status", str(job), user="alice").stdout
        assert f"wider than asked: {words}" in status
        lines = healthy.exec(LOGIN, "muster", "events", str(job), user="alice").stdout.splitlines()
        named = next(at for at, line in enumerate(lines) if f"wider than [placement] asks: {words}; predicted" in line)
        # On a busy machine an agent of two may be paused for seconds before the first step, and ends its ranks.
        stepped = next(at for at, line in enumerate(lines) if "finished its first step" in line)
        assert named < stepped
        training.cancel()


def events(cluster: Cluster, job: int) -> str:
    return cluster.exec(LOGIN, "muster", "events", str(job), user="alice").stdout


def test_nodes_that_tear_a_group_go_back_and_the_job_gets_a_leaf(healthy: Cluster) -> None:
    """Slurm gives up its wait for one leaf of three nodes. After the requeue it waits again, until a leaf is free."""
    blockers = {}
    for node in ("n0", "n5"):
        words = ("sbatch", "--parsable", "--chdir=/tmp", "--output=/dev/null", "--exclusive", f"--nodelist={node}")
        blockers[node] = healthy.exec(LOGIN, *words, "--wrap", "sleep 1800", user="bob").stdout.strip()
    wait_until(lambda: len(healthy.sh(LOGIN, "squeue -h -t R").splitlines()) == 2, 30, "the other jobs run")
    settings = ("parallelism.tensor = 3", 'placement.if_not_available = "wait"', 'slurm.switches = "1@0:00:03"')
    spec = TrainingSpec("given-back", nodes=3, spares=0, arguments=SLOW_STEPS, settings=settings)
    with Training(healthy, spec) as training:
        job = training.submit()
        words = "the job gives these nodes back (1 of 3): requeue"
        wait_until(lambda: words in events(healthy, job), 60, "the nodes go back")
        healthy.exec(LOGIN, "scancel", blockers["n0"], user="bob")
        training.wait_step(1)
        assert {training.node_of(rank) for rank in range(3)} == {"n0", "n1", "n2"}
        assert "(2 of 3)" not in events(healthy, job)
        training.cancel()
    healthy.exec(LOGIN, "scancel", blockers["n5"], user="bob")


@pytest.mark.long  # unit tests and tests/unit/scenarios/required-group.txt have the rule
def test_a_required_group_that_is_torn_does_not_start(healthy: Cluster) -> None:
    settings = (
        "parallelism.tensor = 2",
        'placement.tensor = "require leaf"',
        "placement.retries = 1",
        'slurm.options = ["--nodelist=n0,n9"]',
    )
    spec = TrainingSpec("required", nodes=2, spares=0, arguments=SLOW_STEPS, settings=settings)
    with Training(healthy, spec) as training:
        job = training.submit()
        words = "tensor groups of 2 nodes: 1 of 1 spans 2 leaves, which [placement] requires"
        wait_until(lambda: words in events(healthy, job), 60, "the job ends")
        said = events(healthy, job)
        assert "exit code 92" in said
        assert "generation 1 starts" not in said
        state = "squeue -h -t all -o '%T %c' -j"
        wait_until(lambda: "FAILED" in healthy.sh(LOGIN, f"{state} {job}"), 30, "Slurm has the job as failed")


def test_ranks_are_told_their_gpu_adapters_groups_and_nodes_at_the_start_and_after_a_swap(
    other_settings: Cluster,
) -> None:
    cluster, nodes = other_settings, ("n0", "n1", "n2")
    cluster.reconfigure(gpus=4)
    for node in nodes:
        cluster.give_hardware(node, dataclasses.replace(CROSSED, cluster=f"{0x4A1C:032x}", clique=9))
    wait_until(lambda: all(hardware_of(cluster, node) for node in nodes), 60, "musterd has seen the hardware")
    folder = cluster.shared / "placed"
    job_toml = "\n".join(
        (
            'name = "placed"',
            "nodes = 2",
            "ranks_per_node = 4",
            "spares = 1",
            f"command = {json.dumps(['python3', '-c', TELL])}",
            'run_dir = "/shared/placed"',
            "preload = []",
            "parallelism.tensor = 4",
            f'slurm.options = ["--nodelist={",".join(nodes)}", "--gres=gpu:4"]',
        )
    )
    cluster.sh(LOGIN, f"mkdir -p /shared/placed; cat >/shared/placed/job.toml <<'EOF'\n{job_toml}\nEOF", user="alice")
    job = cluster.exec(LOGIN, "muster", "submit", "/shared/placed/job.toml", user="alice").stdout.strip()
    lost = ""
    for _ in range(2):
        told = partial(told_without, lost, folder, 8)
        ranks = wait_until(told, 120, f"ranks have started without {lost or 'a loss'}")
        assert {rank["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {"0,2,1,3"}
        assert {rank["NCCL_IB_HCA"] for rank in ranks} == {"=mlx5_0,mlx5_1"}
        assert [rank["MUSTER_NEAREST_ADAPTERS"] for rank in ranks] == ["mlx5_0", "mlx5_0", "mlx5_1", "mlx5_1"] * 2
        assert {rank["MUSTER_NVLINK_DOMAIN"] for rank in ranks} == {f"{0x4A1C:032x}.9"}
        levels = [json.loads(rank["MUSTER_GROUP_LEVELS"]) for rank in ranks]
        assert levels == [{"tensor": "node", "data": "nvlink"}] * 8
        assert {rank["hosts"] for rank in ranks} == {"".join(f"{rank['node']}\n" for rank in ranks)}
        shown = json.loads(cluster.exec(LOGIN, "muster", "status", job, "--json", user="alice").stdout)["ranks"]
        assert [rank["node"] for rank in shown] == [rank["node"] for rank in ranks]
        assert [int(rank["gpu"]) for rank in shown] == [0, 2, 1, 3] * 2
        assert [rank.get("local_rank", 0) for rank in shown] == [0, 1, 2, 3] * 2
        assert {rank["leaf"] for rank in shown} == {"s0"}
        assert [rank["coordinates"]["tensor"] for rank in shown] == [0, 1, 2, 3] * 2
        assert [rank["coordinates"]["data"] for rank in shown] == [0] * 4 + [1] * 4
        if not lost:
            lost = ranks[0]["node"]
            cluster.kmsg(lost, FATAL_XID_LINE)
    cluster.exec(LOGIN, "muster", "cancel", job, user="alice")


def told_without(lost: str, folder: Path, ranks: int) -> list[dict[str, str]]:
    """What each rank of the newest generation was told, by rank. Empty if one is missing, or is on the lost node."""
    generation = max((int(path.name.split("-")[1]) for path in folder.glob("told-*")), default=0)
    told = told_in(generation, folder, ranks)
    return [] if lost in {rank["node"] for rank in told} else told


def told_in(generation: int, folder: Path, ranks: int) -> list[dict[str, str]]:
    """What each rank of a generation was told, by rank. Empty if one is missing."""
    paths = [folder / f"told-{generation}-{rank}" for rank in range(ranks)]
    return [json.loads(path.read_text()) for path in paths] if all(path.exists() for path in paths) else []


def hardware_of(cluster: Cluster, node: str) -> bool:
    """Whether the node's musterd has seen its GPUs and their adapters."""
    ask = (
        "from muster.daemon.agent import own_hardware as client; "
        "hardware = client.ask('/run/muster/memory.sock'); "
        "print(sum(bool(gpu.nearest_adapters) for gpu in hardware.gpus))"
    )
    return cluster.exec(node, "python3", "-c", ask, check=False).stdout.strip() == "4"


@pytest.fixture
def described(healthy: Cluster) -> Iterator[Cluster]:
    """The shared cluster, whose controller may have a fabric.toml for the time of one test."""
    yield healthy
    fabric_file(healthy).unlink(missing_ok=True)


def fabric_file(cluster: Cluster) -> Path:
    """/etc/muster/fabric.toml of all hosts, which mount this folder."""
    return cluster.folder / "muster" / "fabric.toml"


def started(cluster: Cluster, job: int) -> dict[str, Any]:
    """The fact that the newest generation of the job has started."""
    lines = cluster.exec(LOGIN, "muster", "events", "--json", str(job), user="alice").stdout.splitlines()
    facts = [json.loads(line) for line in lines]
    found: dict[str, Any] = json.loads([fact for fact in facts if fact["name"] == "GenerationStarted"][-1]["json"])
    return found


def noted_racks(cluster: Cluster, job: int) -> dict[str, int]:
    """How many of the job's nodes are in each rack, by the newest fact about its network."""
    lines = cluster.exec(LOGIN, "muster", "events", "--json", str(job), user="alice").stdout.splitlines()
    noted = [fact["json"] for fact in map(json.loads, lines) if fact["name"] == "FabricNoted"]
    found = Counter[str]()
    for alike in json.loads(noted[-1])["fabric"]["details"]:
        found[alike["details"].get("rack", "")] += sum(count for _, count in alike["nodes"])
    return dict(found)


def racks(**nodes: str) -> str:
    return "[racks]\n" + "".join(f'{rack} = "{names}"\n' for rack, names in nodes.items())


def test_ranks_and_buddies_follow_the_controllers_fabric_toml_also_after_a_change(described: Cluster) -> None:
    """Two leaves with three nodes each. The file says which are one NVLink domain, and which are in one rack."""
    leaves: dict[str, list[str]] = {}
    for node in described.spec.node_names:
        leaves.setdefault(described.spec.leaf_of(node), []).append(node)
    (a, b, c), (d, e, f) = sorted(leaves.values(), key=len)[-2:]
    domains = f'[nvlink]\nd1 = "{b},{c}"\nd2 = "{e},{f}"\n'
    before = racks(r1=f"{a},{b},{d}", r2=f"{c},{e},{f}")
    fabric_file(described).write_text(domains + before)
    settings = ("parallelism.tensor = 2", f'slurm.options = ["--nodelist={a},{b},{c},{d},{e},{f}"]')
    spec = TrainingSpec("described", nodes=6, spares=0, arguments=SLOW_STEPS, settings=settings)
    with Training(described, spec) as training:
        job = training.submit()
        training.wait_step(1)
        nodes = [training.node_of(rank) for rank in range(6)]
        assert {frozenset(nodes[at : at + 2]) for at in (0, 2, 4)} == {
            frozenset(two) for two in ((a, d), (b, c), (e, f))
        }
        apart = {a: {e, f}, b: {e, f}, c: {d}, d: {c}, e: {a, b}, f: {a, b}}
        assert [seat for seat in started(described, job)["seats"] if seat["buddy"] not in apart[seat["node"]]] == []
        # The site moves nodes to other racks. The next generation has other buddies, on the same seats.
        after = racks(r1=f"{a},{e}", r2=f"{b},{c},{d},{f}")
        fabric_file(described).write_text(domains + after)
        wait_until(lambda: noted_racks(described, job) == {"r1": 2, "r2": 4}, 120, "the coordinator notes the change")
        said = events(described, job)
        assert "the network of the gang's nodes has changed: " in said
        assert f"{b}: its GPUs, adapters, rack or power feed have changed" in said
        generation = started(described, job)["generation"]
        training.kill_rank(0)
        training.wait_recovered(generation + 1)
        fact = started(described, job)
        assert [seat["node"] for seat in fact["seats"]] == nodes
        apart = {a: {d, f}, b: {e}, c: {e}, d: {a}, e: {b, c}, f: {a}}
        assert [seat for seat in fact["seats"] if seat["buddy"] not in apart[seat["node"]]] == []
        training.cancel()


@pytest.fixture
def wide(suite: str) -> Iterator[Cluster]:
    """A cluster of 18 nodes on four leaves."""
    with Cluster.up(ClusterSpec(nodes=18, leaves=4, suite=suite)) as cluster:
        yield cluster


@pytest.fixture
def in_blocks(suite: str) -> Iterator[Cluster]:
    """A cluster of 8 nodes in two blocks. Slurm orders nodes by block, and the blocks do not follow the names."""
    if suite == "trixie":
        pytest.skip("Slurm 24.11 has no BlockAsNodeRank")
    spec = ClusterSpec(nodes=8, topology="block", extra=("TopologyParam=BlockAsNodeRank",))
    with Cluster.up(spec) as cluster:
        blocks = ("BlockName=b0 Nodes=n1,n3,n5,n7", "BlockName=b1 Nodes=n0,n2,n4,n6", "BlockSizes=4,8")
        (cluster.folder / "slurm" / "topology.conf").write_text("\n".join(blocks) + "\n")
        cluster.exec(CONTROLLER, "scontrol", "reconfigure")
        wait_until(lambda: "BlockName=b0" in cluster.sh(CONTROLLER, "scontrol show topology"), 30, "Slurm has blocks")
        yield cluster


@pytest.mark.long  # Slurm's own order, and a cluster for each case
@pytest.mark.parametrize("tensor", [1, 4], ids=["replicas", "groups"])
def test_the_order_of_ranks_is_slurms_where_slurm_orders_by_block(in_blocks: Cluster, tensor: int) -> None:
    folder = in_blocks.shared / "blocks"
    job_toml = "\n".join(
        (
            'name = "blocks"',
            "nodes = 8",
            f"command = {json.dumps(['python3', '-c', TELL])}",
            'run_dir = "/shared/blocks"',
            "preload = []",
            f"parallelism.tensor = {tensor}",
        )
    )
    in_blocks.sh(LOGIN, f"mkdir -p /shared/blocks; cat >/shared/blocks/job.toml <<'EOF'\n{job_toml}\nEOF", user="alice")
    job = in_blocks.exec(LOGIN, "muster", "submit", "/shared/blocks/job.toml", user="alice").stdout.strip()
    ranks = wait_told(folder, 1, 8)
    assert [rank["MUSTER_LEAF"] for rank in ranks] == ["b0"] * 4 + ["b1"] * 4
    assert {rank["MUSTER_SLURM_JOB_NODELIST"] for rank in ranks} == {"n[1,3,5,7,0,2,4,6]"}
    if tensor == 1:
        assert [rank["MUSTER_SLURM_PROCID"] for rank in ranks] == [rank["RANK"] for rank in ranks]
    in_blocks.exec(LOGIN, "muster", "cancel", job, user="alice")


def wait_told(folder: Path, generation: int, ranks: int) -> list[dict[str, str]]:
    """What each rank of a generation was told, by rank."""
    return wait_until(partial(told_in, generation, folder, ranks), 120, f"generation {generation} has started")


@pytest.mark.long
def test_tensor_pipeline_and_data_groups_on_18_nodes_and_after_two_swaps(wide: Cluster) -> None:
    for lost, nodes in enumerate(before_and_after_two_swaps(wide, spares=2)):
        assert max(len(leaves) for leaves in leaves_of_groups(wide, nodes, 4)) <= 1 + bool(lost)


@pytest.fixture
def roomy_blocks(suite: str) -> Iterator[Cluster]:
    """A cluster of 20 nodes in four blocks of five, of which two make one pod."""
    if suite == "trixie":
        pytest.skip("Slurm 24.11 has no aggregated blocks")
    with Cluster.up(ClusterSpec(nodes=20, leaves=4, topology="block")) as cluster:
        yield cluster


@pytest.mark.long
def test_groups_stay_in_their_blocks_and_pipelines_in_their_pods_after_two_swaps(roomy_blocks: Cluster) -> None:
    """Four spares are enough for four groups: each block gets one."""
    for nodes in before_and_after_two_swaps(roomy_blocks, spares=4):
        blocks = leaves_of_groups(roomy_blocks, nodes, 4)
        assert [len(group) for group in blocks] == [1, 1, 1, 1]
        # Ranks 0 to 7 are the first stage, ranks 8 to 15 the second one of the same two replicas.
        pods = [{int(block[1:]) // 2 for block in group} for group in blocks]
        assert pods[:2] == pods[2:]


def before_and_after_two_swaps(cluster: Cluster, spares: int) -> Iterator[list[str]]:
    """Runs a job of 16 nodes with tensor groups of four and two stages, and takes away node 0 and another one. Yields
    the node of each rank in each of the three generations, once all ranks agree about the order."""
    folder = cluster.shared / "wide"
    job_toml = "\n".join(
        (
            'name = "wide"',
            "nodes = 16",
            f"spares = {spares}",
            f"command = {json.dumps(['python3', '-c', TELL])}",
            'run_dir = "/shared/wide"',
            "preload = []",
            "parallelism.tensor = 4",
            "parallelism.pipeline = 2",
        )
    )
    cluster.sh(LOGIN, f"mkdir -p /shared/wide; cat >/shared/wide/job.toml <<'EOF'\n{job_toml}\nEOF", user="alice")
    job = cluster.exec(LOGIN, "muster", "submit", "/shared/wide/job.toml", user="alice").stdout.strip()
    lost = list[str]()
    for generation in (1, 2, 3):
        ranks = wait_told(folder, generation, 16)
        nodes = [rank["node"] for rank in ranks]
        assert not set(lost) & set(nodes)
        assert [rank["SLURM_PROCID"] for rank in ranks] == [str(number) for number in range(16)]
        assert [rank["SLURM_NODEID"] for rank in ranks] == [str(number) for number in range(16)]
        assert {rank["SLURM_NTASKS"] for rank in ranks} == {"16"}
        assert {rank["SLURM_JOB_NODELIST"] for rank in ranks} == {",".join(nodes)}
        leaf = cluster.spec.leaf_of if cluster.spec.topology == "tree" else block_of(cluster)
        assert [rank["MUSTER_LEAF"] for rank in ranks] == [leaf(node) for node in nodes]
        yield nodes
        lost.append(nodes[0] if not lost else nodes[9])
        cluster.kmsg(lost[-1], FATAL_XID_LINE)
    cluster.exec(LOGIN, "muster", "cancel", job, user="alice")


def block_of(cluster: Cluster) -> Callable[[str], str]:
    """The block of a node: the test cluster's blocks are the groups of its leaf switches."""
    return lambda node: f"b{cluster.spec.leaf_of(node)[1:]}"
