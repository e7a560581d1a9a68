"""The shape of a cluster, and the files that result."""

from __future__ import annotations

import pytest

from muster.slurm.image.engine import EngineError
from muster.slurm.testcluster.registry import BY_HAND, check_name, owner_has_exited, owner_of_this_process
from muster.slurm.testcluster.spec import ClusterSpec, SpecError
from muster.slurm.testcluster.topologies import torus_of
from muster.slurm.testcluster.waiting import WaitTimeout, wait_until


def settings(spec: ClusterSpec) -> dict[str, str]:
    lines = spec.files()["slurm.conf"].splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith(("NodeName", "PartitionName")))


def test_ten_nodes_hang_on_four_leaves_under_one_spine() -> None:
    assert ClusterSpec().files()["topology.conf"] == (
        "SwitchName=s0 Nodes=n0,n1,n2\n"
        "SwitchName=s1 Nodes=n3,n4\n"
        "SwitchName=s2 Nodes=n5,n6,n7\n"
        "SwitchName=s3 Nodes=n8,n9\n"
        "SwitchName=spine Switches=s0,s1,s2,s3\n"
    )


def test_blocks_are_at_least_as_large_as_the_base_block() -> None:
    files = ClusterSpec(topology="block").files()
    assert files["topology.conf"].splitlines()[-1] == "BlockSizes=2,4"
    assert "TopologyPlugin=topology/block\n" in files["slurm.conf"]


def test_a_ring_has_16_nodes_at_most() -> None:
    lines = ClusterSpec(nodes=20, topology="ring").files()["topology.conf"].splitlines()
    assert [len(line.split("Nodes=")[1].split(",")) for line in lines] == [16, 4]


@pytest.mark.parametrize(("nodes", "sides"), [(1, (1, 1, 1)), (10, (5, 2, 1)), (16, (4, 2, 2)), (32, (4, 4, 2))])
def test_a_torus_is_as_near_to_a_cube_as_possible(nodes: int, sides: tuple[int, int, int]) -> None:
    assert torus_of(nodes) == sides
    x, y, z = sides
    assert f"dims: {{ x: {x}, y: {y}, z: {z} }}" in ClusterSpec(nodes=nodes, topology="torus").files()["topology.yaml"]


def test_each_of_several_topologies_has_a_partition() -> None:
    files = ClusterSpec(topology="several").files()
    assert "topology.conf" not in files
    assert files["topology.yaml"].count("- topology:") == 3
    assert [line for line in files["slurm.conf"].splitlines() if "Topology=" in line] == [
        "PartitionName=block Nodes=n[0-9] MaxTime=INFINITE State=UP Topology=block",
        "PartitionName=flat Nodes=n[0-9] MaxTime=INFINITE State=UP Topology=flat",
    ]


def test_a_flat_network_has_no_file() -> None:
    assert ClusterSpec(topology="flat").files().keys() == {"slurm.conf", "cgroup.conf"}


@pytest.mark.parametrize(("suite", "key"), [("forky", "NamespaceType"), ("trixie", "JobContainerType")])
def test_a_confined_cluster_limits_jobs_as_most_sites_do(suite: str, key: str) -> None:
    spec = ClusterSpec(confined=True, private_tmp="tmpfs", suite=suite)
    conf = settings(spec)
    assert (conf["ProctrackType"], conf["PrologFlags"]) == ("proctrack/cgroup", "Contain,Alloc,X11")
    assert conf[key].endswith("/tmpfs")
    assert "ConstrainRAMSpace=yes" in spec.files()["cgroup.conf"]
    assert "Dirs=/tmp,/dev/shm" in spec.files()["job_container.conf"]


def test_a_job_has_process_numbers_of_its_own_with_a_new_slurm_only() -> None:
    spec = ClusterSpec(private_tmp="linux")
    assert settings(spec)["NamespaceType"] == "namespace/linux"
    assert "clone_ns_flags: [CLONE_NEWPID]" in spec.files()["namespace.yaml"]
    with pytest.raises(SpecError, match="trixie has no private /tmp 'linux'; choose one of tmpfs"):
        ClusterSpec(private_tmp="linux", suite="trixie")


def test_an_old_slurm_has_fewer_topologies() -> None:
    with pytest.raises(SpecError, match="trixie has no topology 'torus'; choose one of tree, block, flat"):
        ClusterSpec(topology="torus", suite="trixie")
    with pytest.raises(SpecError, match="forky has no topology 'mesh'"):
        ClusterSpec(topology="mesh")


def test_fewer_nodes_than_leaves_have_a_leaf_each() -> None:
    spec = ClusterSpec(nodes=2)
    assert [spec.leaf_of(node) for node in spec.node_names] == ["s0", "s1"]


def test_every_host_has_an_address_and_a_hardware_address_of_its_own() -> None:
    spec = ClusterSpec(nodes=200)
    addresses = [spec.address(host, "10.200.7") for host in spec.hosts]
    assert len(set(addresses)) == 202
    assert (addresses[0], addresses[2], addresses[-1]) == ("10.200.7.10", "10.200.7.12", "10.200.7.211")
    assert spec.mac("n0", "10.200.7") == "02:4d:0a:c8:07:0c"


def test_the_timeouts_asked_for_are_in_slurm_conf() -> None:
    conf = settings(ClusterSpec(slurmd_timeout=30, requeue_delay=5))
    assert conf["SlurmdTimeout"] == "30"
    assert conf["SchedulerParameters"].endswith(",permit_job_expansion,requeue_delay=5")
    assert conf["SlurmctldParameters"] == "enable_expedited_requeue"


def test_slurms_own_requeue_stays_unless_asked_otherwise() -> None:
    conf = settings(ClusterSpec(expedited_requeue=False))
    assert "requeue_delay" not in conf["SchedulerParameters"]
    assert "SlurmctldParameters" not in conf


def test_nodes_of_several_kinds_have_their_own_names_and_gpus() -> None:
    kinds = ("gpu-a-[001-002,015] Gres=gpu:a100:2,gpu:h100:4 Features=ib", "r[1-2]n[01-02] Gres=gpu:1g.10gb:7")
    spec = ClusterSpec(kinds=kinds)
    assert spec.node_names == ["gpu-a-001", "gpu-a-002", "gpu-a-015", "r1n01", "r1n02", "r2n01", "r2n02"]
    assert (spec.nodes, ClusterSpec.from_json(spec.to_json())) == (7, spec)
    files = spec.files()
    assert files["gres.conf"].splitlines() == [
        "NodeName=gpu-a-[001-002,015] Name=gpu Type=a100 File=/dev/nvidia[0-1]",
        "NodeName=gpu-a-[001-002,015] Name=gpu Type=h100 File=/dev/nvidia[2-5]",
        "NodeName=r[1-2]n[01-02] Name=gpu Type=1g.10gb File=/dev/nvidia[0-6]",
    ]
    assert files["topology.conf"].startswith("SwitchName=s0 Nodes=gpu-a-001,gpu-a-002\n")
    assert "NodeName=gpu-a-[001-002,015] Gres=gpu:a100:2,gpu:h100:4 Features=ib CPUs=8" in files["slurm.conf"]
    assert "PartitionName=main Nodes=gpu-a-[001-002,015],r[1-2]n[01-02] " in files["slurm.conf"]


def test_fake_gpus_are_a_generic_resource_with_devices() -> None:
    files = ClusterSpec(gpus=8).files()
    assert files["gres.conf"] == "NodeName=n[0-9] Name=gpu File=/dev/nvidia[0-7]\n"
    assert "Gres=gpu:8" in files["slurm.conf"]
    assert "gres.conf" not in ClusterSpec().files()


def test_a_cluster_with_accounting_asks_slurmdbd_and_holds_to_its_limits() -> None:
    with_accounts = settings(ClusterSpec(accounting=True))
    assert with_accounts["AccountingStorageType"] == "accounting_storage/slurmdbd"
    assert with_accounts["AccountingStorageEnforce"] == "associations,limits,qos"
    assert "AccountingStorageType" not in settings(ClusterSpec())


def test_a_spec_comes_back_from_its_json() -> None:
    spec = ClusterSpec(nodes=3, extra=("Prolog=/x",), requeue_delay=1)
    assert ClusterSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("nodes", [0, 201])
def test_an_impossible_number_of_nodes_is_refused(nodes: int) -> None:
    with pytest.raises(SpecError, match=rf"{nodes} nodes: a cluster has 1 to 200"):
        ClusterSpec(nodes=nodes)


@pytest.mark.parametrize("name", ["", "Upper", "-x", "a/b", "../up", "x" * 40])
def test_a_name_that_containers_cannot_carry_is_refused(name: str) -> None:
    with pytest.raises(EngineError, match="can't name a cluster"):
        check_name(name)


def test_an_owner_has_exited_when_its_pid_is_free_or_belongs_to_another_process() -> None:
    mine = owner_of_this_process()
    pid = mine.split("-")[0]
    assert not owner_has_exited(mine)
    assert owner_has_exited(f"{pid}-1")
    assert owner_has_exited("0-torn")
    assert not owner_has_exited(BY_HAND)


def test_waiting_returns_the_first_true_answer() -> None:
    answers = iter([0, "", "yes"])
    assert wait_until(lambda: next(answers), 5, "a yes", every=0) == "yes"


def test_a_timeout_names_the_condition_and_the_last_answer() -> None:
    with pytest.raises(WaitTimeout, match=r"not within 0 s: the moon rises \(last answer: 0\)"):
        wait_until(lambda: 0, 0, "the moon rises", every=0)
