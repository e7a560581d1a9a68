"""What a rank is told of its place: its GPU, its adapters, how far its groups reach, who runs where."""

from __future__ import annotations

import json
import resource
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from muster.daemon.agent.own_hardware import HardwareUnknown, OwnHardware
from muster.daemon.agent.ranks.place.group_levels import axes_of, group_levels
from muster.daemon.agent.ranks.place.local_gpus import LocalGpus, device_variables, local_gpus
from muster.daemon.agent.ranks.place.node_inventory import NodeInventory, read_nccl_files
from muster.daemon.agent.ranks.rank_environment import StoreAccess, environment_of_rank
from muster.daemon.agent.ranks.rank_places import HostFile, RankPlaces
from muster.daemon.agent.ranks.rank_process import RankId
from muster.fabric.model.node import Nic, Node
from muster.v1.agent_pb2 import Order, RankPlace
from muster.v1.common_pb2 import Adapter, Gpu, Hardware, JobSpec, Member

CROSSED = Node("n1", 4, (0, 1, 0, 1), (Nic("mlx5_0", (0, 2)), Nic("mlx5_1", (1, 3)), Nic("mlx5_10")))
"""GPUs 0 and 2 are on one socket, 1 and 3 on the other."""
UUIDS = {f"GPU-{index}": index for index in range(4)}
SLURM = {"SLURM_STEP_ID": "0", "SLURM_STEP_GPUS": "0,1,2,3", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}


def gpus(environ: Mapping[str, str], ranks: int = 4, node: Node = CROSSED, **chosen: str) -> LocalGpus:
    return local_gpus(environ, chosen, node, UUIDS, ranks)


def test_neighbouring_ranks_get_gpus_of_one_socket() -> None:
    assert gpus(SLURM) == LocalGpus("0,2,1,3", (0, 2, 1, 3), (0, 2, 1, 3))


def test_where_slurm_constrains_devices_its_gpus_are_counted_anew() -> None:
    eight = Node("n1", 8, (0, 1) * 4)
    environ = {**SLURM, "SLURM_STEP_GPUS": "4-7"}
    assert gpus(environ, node=eight) == LocalGpus("0,2,1,3", (4, 6, 5, 7), (4, 6, 5, 7))
    environ = {**SLURM, "SLURM_STEP_GPUS": "4,5,6,7", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert gpus(environ, node=eight) == LocalGpus("4,6,5,7", (4, 6, 5, 7), (4, 6, 5, 7))


@pytest.mark.parametrize(
    ("environ", "ranks", "of_rank"),
    [
        ({**SLURM, "CUDA_VISIBLE_DEVICES": "GPU-3,GPU-1,GPU-0,GPU-2"}, 4, (3, 1, 0, 2)),
        ({**SLURM, "CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2,MIG-3,MIG-4"}, 4, ()),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4, ()),  # not from Slurm
        (SLURM, 1, ()),  # one process with all GPUs
        (SLURM, 2, ()),  # two GPUs for each process
        ({**SLURM, "SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": "0"}, 1, (1,)),
        ({**SLURM, "CUDA_VISIBLE_DEVICES": "3,3,1,0"}, 4, ()),
        ({**SLURM, "CUDA_VISIBLE_DEVICES": ""}, 4, ()),
        ({**SLURM, "SLURM_STEP_GPUS": "1,3", "CUDA_VISIBLE_DEVICES": "1"}, 1, ()),  # the first or the second?
        ({**SLURM, "SLURM_STEP_GPUS": "x"}, 4, ()),
        ({**SLURM, "SLURM_STEP_GPUS": "0-999999999", "CUDA_VISIBLE_DEVICES": "0,1"}, 2, ()),
    ],
)
def test_what_muster_does_not_understand_stays_as_it_is(
    environ: dict[str, str], ranks: int, of_rank: tuple[int, ...]
) -> None:
    found = gpus(environ, ranks)
    assert (found.visible, found.of_rank) == (None, of_rank)


def test_gpus_that_the_user_chooses_stay() -> None:
    found = gpus(SLURM, CUDA_VISIBLE_DEVICES="3,2,1,0")
    assert found == LocalGpus(None, (3, 2, 1, 0), (3, 2, 1, 0))
    constrained = {**SLURM, "SLURM_STEP_GPUS": "2,3"}
    assert gpus(constrained, 2, CUDA_VISIBLE_DEVICES="1,0") == LocalGpus(None, (3, 2), (3, 2))
    assert gpus(constrained, 1, CUDA_VISIBLE_DEVICES="1") == LocalGpus()


def test_a_node_of_unknown_hardware_changes_nothing() -> None:
    assert gpus(SLURM, node=Node("n1")).visible is None
    assert device_variables(SLURM, gpus(SLURM, node=Node("n1")), Node("n1"), 0) == {}


def test_without_a_limit_by_slurm_all_gpus_are_used() -> None:
    assert gpus({}) == LocalGpus(used=(0, 1, 2, 3))
    assert gpus({"SLURM_JOB_GPUS": "2,3"}) == LocalGpus(used=(2, 3))
    # In a step, this one names the GPUs of the batch host.
    assert gpus({"SLURM_JOB_GPUS": "2,3", "SLURM_STEP_ID": "0"}) == LocalGpus(used=(0, 1, 2, 3))


def test_all_ranks_of_a_node_get_the_same_adapters_and_none_that_is_near_no_gpu() -> None:
    told = [device_variables(SLURM, gpus(SLURM), CROSSED, local) for local in range(4)]
    assert [one["NCCL_IB_HCA"] for one in told] == ["=mlx5_0,mlx5_1"] * 4
    assert [one["MUSTER_NEAREST_ADAPTERS"] for one in told] == ["mlx5_0", "mlx5_0", "mlx5_1", "mlx5_1"]
    assert {one["CUDA_VISIBLE_DEVICES"] for one in told} == {"0,2,1,3"}
    assert {one["CUDA_DEVICE_ORDER"] for one in told} == {"PCI_BUS_ID"}


def test_a_job_with_some_gpus_of_a_node_is_allowed_their_adapters_only() -> None:
    environ = {**SLURM, "SLURM_STEP_GPUS": "1,3", "CUDA_VISIBLE_DEVICES": "1,3"}
    told = device_variables(environ, gpus(environ, 2), CROSSED, 0)
    assert told == {"CUDA_VISIBLE_DEVICES": "1,3", "NCCL_IB_HCA": "=mlx5_1", "MUSTER_NEAREST_ADAPTERS": "mlx5_1"}


def test_what_the_user_or_the_site_says_of_adapters_stays() -> None:
    assert "NCCL_IB_HCA" not in device_variables({**SLURM, "NCCL_IB_HCA": "^mlx5_9"}, gpus(SLURM), CROSSED, 0)
    file = "# a site\nNCCL_DEBUG=WARN\nNCCL_IB_HCA==mlx5_3 # all\n"
    assert "NCCL_IB_HCA" not in device_variables(SLURM, gpus(SLURM), CROSSED, 0, file)
    assert "NCCL_IB_HCA" in device_variables(SLURM, gpus(SLURM), CROSSED, 0, "# NCCL_IB_HCA=mlx5_3\n")


def test_without_rdma_nothing_is_said_of_adapters() -> None:
    plain = Node("n1", 4, (0, 1, 0, 1))
    assert device_variables(SLURM, gpus(SLURM, node=plain), plain, 0).keys() == {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
    }


def test_the_files_of_nccl_are_read(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_DEBUG=INFO\n")
    (tmp_path / "other.conf").write_text("NCCL_IB_HCA=x\n")
    assert "NCCL_DEBUG=INFO" in read_nccl_files({"HOME": str(tmp_path)})
    assert read_nccl_files({"HOME": str(tmp_path), "NCCL_CONF_FILE": str(tmp_path / "other.conf")}).startswith(
        "NCCL_IB_HCA"
    )
    assert "NCCL_DEBUG=INFO" not in read_nccl_files({"HOME": "/nonexistent"})


# -- groups ----------------------------------------------------------------------------------------------------------


def member(node: str, leaf: str = "", pod: str = "", nvlink_domain: str = "") -> Member:
    return Member(node=node, leaf=leaf, pod=pod, nvlink_domain=nvlink_domain)


def test_the_level_of_each_group() -> None:
    # Two ranks a node, tensor 2 within a node, pipelines over two nodes, data over both halves.
    axes = axes_of(JobSpec(tensor_parallel=2, context_parallel=1, expert_parallel=1, pipeline_parallel=2), 8)
    assert axes is not None
    nodes = ["n0", "n1", "n2", "n3"]
    network = {
        "n0": member("n0", "s0", "p0", "c.1"),
        "n1": member("n1", "s0", "p0", "c.1"),
        "n2": member("n2", "s1", "p0", "c.2"),
        "n3": member("n3", "s2", "p1"),
    }
    # Data groups are 0 and 2 (n0, n1), 4 and 6 (n2, n3). Pipelines are 0 and 4 (n0, n2), 2 and 6 (n1, n3).
    assert group_levels(axes, 0, 2, nodes, network) == {"tensor": "node", "data": "nvlink", "pipeline": "pod"}
    assert group_levels(axes, 6, 2, nodes, network) == {"tensor": "node", "data": "any", "pipeline": "any"}


def test_what_nobody_knows_holds_no_two_nodes() -> None:
    axes = axes_of(JobSpec(), 4)
    assert axes is not None
    nodes = [f"n{at}" for at in range(4)]
    assert group_levels(axes, 0, 1, nodes, {}) == {"data": "any"}
    flat = {name: member(name, "s0") for name in nodes}
    assert group_levels(axes, 0, 1, nodes, flat) == {"data": "leaf"}


def test_a_job_with_fewer_nodes_has_fewer_replicas() -> None:
    axes = axes_of(JobSpec(tensor_parallel=2), 6)
    assert axes is not None
    assert axes.data == 3
    assert axes_of(JobSpec(tensor_parallel=4), 6) is None


# -- the whole -------------------------------------------------------------------------------------------------------

HARDWARE = Hardware(
    gpus=[
        Gpu(index=at, uuid=f"GPU-{at}", numa_node=at % 2, nearest_adapters=[f"mlx5_{at % 2}"], nvlink_cluster="c")
        for at in range(4)
    ],
    adapters=[Adapter(infiniband_device=f"mlx5_{at}") for at in range(3)],
)


def order(generation: int, *nodes: str) -> Order:
    places = [
        RankPlace(rank=4 * seat + local, node=node, local_rank=local)
        for seat, node in enumerate(nodes)
        for local in range(4)
    ]
    members = [Member(node=node, leaf="s1", group_rank=seat, nvlink_domain="c.0") for seat, node in enumerate(nodes)]
    return Order(generation=generation, world_size=4 * len(nodes), places=places, members=members)


def test_the_environment_of_the_ranks_of_a_node_over_two_generations() -> None:
    spec = JobSpec(tensor_parallel=4)
    places = RankPlaces("n1", spec, SLURM, lambda: NodeInventory(HARDWARE))
    ranks = [RankId(4 + local, local, 1) for local in range(4)]
    positions = places.positions(ranks, order(1, "n0", "n1"))
    told = [
        environment_of_rank(SLURM, positions[4 + local], StoreAccess(False, False), "g", "/run") for local in range(4)
    ]
    assert [places.gpu_of(4 + local) for local in range(4)] == [0, 2, 1, 3]
    assert {one["CUDA_VISIBLE_DEVICES"] for one in told} == {"0,2,1,3"}
    assert {one["NCCL_IB_HCA"] for one in told} == {"=mlx5_0,mlx5_1"}
    assert told[0]["MUSTER_NVLINK_DOMAIN"] == "c.0"
    assert json.loads(told[0]["MUSTER_GROUP_LEVELS"]) == {"tensor": "node", "data": "nvlink"}
    path = Path(told[0]["MUSTER_HOSTFILE"])
    assert path.read_text() == "n0\n" * 4 + "n1\n" * 4
    after = places.positions(ranks, order(2, "n5", "n1"))
    assert after[4].host_file == str(path)
    assert path.read_text() == "n5\n" * 4 + "n1\n" * 4
    places.close()
    assert not path.exists()


def test_a_rank_of_another_generation_or_node_has_no_gpu() -> None:
    assert RankPlaces("n1").gpu_of(3) is None


def test_a_host_file_is_read_by_other_processes_and_ends_with_its_agent() -> None:
    file = HostFile()
    path = file.write(["n0", "n1"])
    assert file.write(["n2"]) == path
    assert subprocess.run(["cat", path], capture_output=True, check=True).stdout == b"n2\n"
    file.close()
    file.close()
    assert not Path(path).exists()


def test_a_host_file_without_memory_stops_no_rank() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert HostFile().write(["n0"]) == ""
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_what_musterd_said_before_stays_while_it_does_not_answer() -> None:
    answers: list[Hardware | HardwareUnknown] = [HARDWARE, HardwareUnknown("no musterd")]

    def ask(socket: str) -> Hardware:
        assert socket == "/run/muster/memory.sock"
        answer = answers.pop(0)
        if isinstance(answer, HardwareUnknown):
            raise answer
        return answer

    facts = OwnHardware("/run/muster/memory.sock", {}, ask)
    await facts.refresh()
    await facts.refresh()
    assert facts.current.hardware == HARDWARE
    assert facts.nvlink_domain == "c.0"
    assert answers == []
    await OwnHardware("", {}, ask).refresh()  # asks nobody


async def test_a_question_that_hangs_is_asked_once_and_its_answer_taken_when_it_comes() -> None:
    asked, answer = list[str](), threading.Event()

    def ask(socket: str) -> Hardware:
        asked.append(socket)
        answer.wait(60)
        return HARDWARE

    facts = OwnHardware("s", {}, ask, deadline_s=0.01)
    await facts.refresh()
    await facts.refresh()
    assert (asked, facts.current) == (["s"], NodeInventory())
    answer.set()
    patient = OwnHardware("s", {}, ask)
    await patient.refresh()
    assert patient.current.hardware == HARDWARE
