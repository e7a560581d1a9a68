"""The environment of ranks is torchrun's."""

import pytest

from muster.daemon.agent.ranks.rank_environment import (
    RankPosition,
    StoreAccess,
    environment_of_rank,
    launched_environment,
    shared_environment,
)
from muster.daemon.host.process_tree import read_environment

PLACE = RankPosition(
    rank=5,
    local_rank=1,
    world_size=8,
    local_world_size=2,
    group_rank=2,
    nodes=("n4", "n0", "n7", "n1"),
    master_addr="10.0.0.7",
    master_port=4242,
    generation=3,
    leaf="s1",
)
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "6",
    "SLURM_NTASKS": "9",
    "SLURM_NNODES": "9",
    "SLURM_JOB_NUM_NODES": "9",
    "SLURM_JOB_NODELIST": "n[0-8]",
    "SLURM_TASKS_PER_NODE": "1(x9)",
    "SLURM_GTIDS": "6",
}
"""What Slurm says on node n7, where it has started an agent as task 6 of 9: the allocation has spares."""


def test_as_torchrun_sets_it() -> None:
    found = environment_of_rank({}, PLACE, StoreAccess(hosted=True, libuv=True), "gang", "/run")
    assert found == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "4",
        "ROLE_RANK": "5",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": "8",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "4242",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "gang",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "MUSTER_JOB": "gang",
        "MUSTER_GENERATION": "3",
        "MUSTER_RUN_DIR": "/run",
        "MUSTER_LEAF": "s1",
        "MUSTER_NVLINK_DOMAIN": "",
        "MUSTER_GROUP_LEVELS": "{}",
        "MUSTER_HOSTFILE": "",
    }


def test_slurms_variables_agree_with_the_rank_and_its_own_values_are_kept() -> None:
    found = environment_of_rank(SLURM, PLACE, StoreAccess(hosted=True, libuv=True), "gang", "/run")
    assert {name: value for name, value in found.items() if name.startswith("SLURM_")} == {
        "SLURM_JOB_ID": "77",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
        "SLURM_NTASKS": "8",
        "SLURM_NNODES": "4",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_JOB_NODELIST": "n4,n0,n7,n1",
        "SLURM_TASKS_PER_NODE": "2(x4)",
        "SLURM_GTIDS": "4,5",
    }
    kept = {name.removeprefix("MUSTER_"): value for name, value in found.items() if name.startswith("MUSTER_SLURM_")}
    assert kept == {name: value for name, value in SLURM.items() if name != "SLURM_JOB_ID"}


def test_in_a_step_a_rank_has_all_that_srun_sets_also_what_the_launch_lacks() -> None:
    found = environment_of_rank({"SLURM_STEP_ID": "4"}, PLACE, StoreAccess(hosted=True, libuv=True), "gang", "/run")
    assert {
        name: found[name] for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
    } == {
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "8",
        "SLURM_NTASKS_PER_NODE": "2",
    }
    assert not [name for name in found if name.startswith("MUSTER_SLURM_")]
    outside = environment_of_rank({"SLURM_JOB_ID": "4"}, PLACE, StoreAccess(hosted=True, libuv=True), "gang", "/run")
    assert "SLURM_PROCID" not in outside


def test_a_launch_gives_all_but_what_slurm_says_of_the_node() -> None:
    own = {
        "PATH": "/usr/bin",
        "MUSTER_SPEC": "{}",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "SLURMD_NODENAME": "n4",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "5",
        "SLURM_NNODES": "5",
        "SLURM_CPU_BIND": "quiet,none",
        "SLURM_UMASK": "0022",
    }
    launch = {"PATH": "/venv/bin", "PYTHONPATH": "/home/lib", "SLURM_NNODES": "4", "SLURMD_NODENAME": "n0"}
    assert launched_environment(own, {**launch, "CUDA_VISIBLE_DEVICES": "0"}) == {
        "PATH": "/venv/bin",
        "PYTHONPATH": "/home/lib",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "SLURMD_NODENAME": "n4",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "5",
        "SLURM_NNODES": "4",
        "SLURM_UMASK": "0022",
    }


def test_an_environment_is_read_as_the_kernel_shows_it() -> None:
    text = b"A=1\0B=x=y\nz\0C=\xff\0\0nonsense\0=hidden\0"
    assert read_environment(text) == {"A": "1", "B": "x=y\nz", "C": "\udcff"}


@pytest.mark.parametrize(
    ("store", "use_libuv", "expected"),
    [
        (StoreAccess(hosted=True, libuv=True), None, ("True", None)),
        (StoreAccess(hosted=True, libuv=True), "0", ("1", "0")),
        (StoreAccess(hosted=True, libuv=False), None, ("1", "0")),
        (StoreAccess(hosted=False, libuv=True), None, ("False", None)),
        (StoreAccess(hosted=False, libuv=False), None, ("False", "0")),
    ],
)
def test_how_the_store_is_reached(store: StoreAccess, use_libuv: str | None, expected: tuple[str, str | None]) -> None:
    start = {} if use_libuv is None else {"USE_LIBUV": use_libuv}
    found = environment_of_rank(start, PLACE, store, "gang", "/run")
    assert (found["TORCHELASTIC_USE_AGENT_STORE"], found.get("USE_LIBUV")) == expected


@pytest.mark.parametrize(("libuv", "told"), [(True, None), (False, "0")])
def test_a_rank_of_srun_is_none_of_torchruns_and_opens_its_own_store(libuv: bool, told: str | None) -> None:
    store = StoreAccess(hosted=True, libuv=libuv)
    of_torchrun = environment_of_rank(SLURM, PLACE, store, "gang", "/run")
    found = environment_of_rank(SLURM, PLACE, store, "gang", "/run", of_srun=True)
    assert not [name for name in found if name.startswith("TORCHELASTIC")]
    assert found["USE_LIBUV"] == told if told else "USE_LIBUV" not in found
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_LOCALID"):
        assert found[name] == of_torchrun[name]


def test_the_users_word_counts() -> None:
    assert shared_environment({"OMP_NUM_THREADS": "4", "A": "1"}, {"A": "2"}) == {"OMP_NUM_THREADS": "4", "A": "2"}
    assert shared_environment({}, {})["OMP_NUM_THREADS"] == "1"
    assert shared_environment({"MUSTER_SPEC": "{}", "GRPC_VERBOSITY": "NONE"}, {}).keys() == {"OMP_NUM_THREADS"}
