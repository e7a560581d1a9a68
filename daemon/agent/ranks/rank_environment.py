"""The environment of ranks: the variables of torchrun, those of Muster, and Slurm's in the gang's order. Pure.

Ranks get the environment of their agent. If a user's own batch script has launched them, they get that of the launch,
in which what Slurm says of the node is the agent's (`launched_environment`).

Slurm numbers the nodes of an allocation in its own order, spares included, and knows of no swap. Scripts and libraries
read its variables, so ranks get values that agree with RANK. Slurm's own value is kept: MUSTER_SLURM_PROCID has that of
SLURM_PROCID.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# torchrun sets this variable to 1 unless the user sets it. Libraries that read their own variable follow it too.
OMP_THREADS_VARIABLE = "OMP_NUM_THREADS"
KEPT_PREFIX = "MUSTER_"
"""In front of the name that keeps Slurm's own value."""
# Settings of the agent that ranks do not need, or that would harm them: gRPC in a user's script may need TLS 1.2, and
# shall show its errors.
_AGENT_VARIABLES = frozenset(
    {
        "MUSTER_SPEC",
        "MUSTER_AUTH",
        "MUSTER_CONNECTIONS",
        "MUSTER_COORDINATOR",
        "MUSTER_POOL",
        "MUSTER_RESTARTS",
        "MUSTER_DURABLE",
        "MUSTER_RANK_ENVIRONMENT",
        "MUSTER_RUN_TOKEN",
        "MUSTER_USER_NAME",
        "GRPC_SSL_CIPHER_SUITES",
        "GRPC_VERBOSITY",
    }
)
_OF_STEP = (
    *("SLURMD_", "SLURM_STEP", "SLURM_SRUN_COMM_", "SLURM_TOPOLOGY_", "SLURM_LAUNCH_NODE_", "SLURM_JOBID"),
    *("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK_PID"),
    *("SLURM_CPUS_ON_NODE", "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS", "SLURM_RESTART_COUNT", "SLURM_JOB_END_TIME"),
    *("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
)
"""Beginnings of the names that Slurm sets anew for a node or for a task, whatever the environment of srun has."""
_OPTIONS_OF_AGENTS = ("SLURM_CPU_BIND", "SLURM_MPI_TYPE", "SLURM_EXPORT_ENV")
"""Likewise, of options of the srun that has started the agents: they say nothing of the ranks."""


@dataclass(frozen=True, slots=True)
class RankPosition:
    """A rank's numbers in its generation.

    nodes: the nodes that carry ranks, by group rank.
    leaf, nvlink_domain: the leaf switch and the NVLink domain of its node; empty if none is known.
    group_levels: the tightest level of the network that holds each of its groups, by the kind of the group.
    host_file: the path of the rank map; empty: there is none.
    devices: the variables that tell its GPU and its network adapters.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int
    nodes: tuple[str, ...]
    master_addr: str
    master_port: int
    generation: int
    leaf: str = ""
    nvlink_domain: str = ""
    group_levels: Mapping[str, str] = field(default_factory=dict)
    host_file: str = ""
    devices: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """How ranks reach the rendezvous store. `hosted`: the store already listens; otherwise rank 0 opens it. `libuv`:
    this torch has the libuv store."""

    hosted: bool
    libuv: bool


def shared_environment(environ: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """The environment that all ranks and generations share: this process's environment under the spec's [env]."""
    return {OMP_THREADS_VARIABLE: "1", **without_agent_settings(environ), **wanted}


def without_agent_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without the settings of the agent."""
    return {name: value for name, value in environ.items() if name not in _AGENT_VARIABLES}


def launched_environment(own: Mapping[str, str], launch: Mapping[str, str]) -> dict[str, str]:
    """The environment that a process on this node would have if srun had been started with `launch`.

    Args:
        own: this agent's own environment.
        launch: that of the batch script where it launches the ranks.
    """
    of_slurm = {name: value for name, value in own.items() if name.startswith(("SLURM", *_OF_STEP))}
    told = {name: value for name, value in of_slurm.items() if not name.startswith(_OPTIONS_OF_AGENTS)}
    of_step = {name: value for name, value in of_slurm.items() if name.startswith(_OF_STEP)}
    return {**told, **launch, **of_step}


def task_environment(base: Mapping[str, str], own_nodes: Sequence[str], node: str) -> dict[str, str]:
    """`base` with what srun would say to a task on `node`, if it had started one on each node of the script.

    Args:
        own_nodes: the nodes of the script. A node that is none of them, a spare, is told what the last one is told.
    """
    if not own_nodes:
        return dict(base)
    at = own_nodes.index(node) if node in own_nodes else len(own_nodes) - 1
    return {**base, **_as_slurm_says(RankPosition(at, 0, len(own_nodes), 1, at, tuple(own_nodes), "", 0, 0))}


def environment_text(environment: Mapping[str, str]) -> str:
    """What `process_tree.read_environment` reads."""
    return "".join(f"{name}={value}\0" for name, value in environment.items())


def environment_of_rank(
    base: Mapping[str, str],
    place: RankPosition,
    store: StoreAccess,
    gang: str,
    run_dir: str,
    *,
    of_srun: bool = False,
) -> dict[str, str]:
    """The whole environment of one rank, except the number of its socket to the agent.

    `of_srun`: srun would start it. Libraries take a rank with TORCHELASTIC variables for one of torchrun, and torch
    then waits for a store at whatever address and port the script chooses.
    """
    return {
        **base,
        **_agreeing_with_rank(base, place),
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.group_rank),
        "GROUP_WORLD_SIZE": str(len(place.nodes)),
        "ROLE_RANK": str(place.rank),
        "ROLE_NAME": base.get("ROLE_NAME", "default"),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "MUSTER_JOB": gang,
        "MUSTER_GENERATION": str(place.generation),
        "MUSTER_RUN_DIR": run_dir,
        "MUSTER_LEAF": place.leaf,
        "MUSTER_NVLINK_DOMAIN": place.nvlink_domain,
        "MUSTER_GROUP_LEVELS": json.dumps(place.group_levels),
        "MUSTER_HOSTFILE": place.host_file,
        **place.devices,
        **(_own_store(store) if of_srun else _as_torchrun_says(base, place, store, gang)),
    }


def _as_torchrun_says(base: Mapping[str, str], place: RankPosition, store: StoreAccess, gang: str) -> dict[str, str]:
    return {
        "TORCHELASTIC_RESTART_COUNT": str(max(place.generation - 1, 0)),
        "TORCHELASTIC_MAX_RESTARTS": base.get("TORCHELASTIC_MAX_RESTARTS", "0"),
        "TORCHELASTIC_RUN_ID": base.get("TORCHELASTIC_RUN_ID", gang),
        **_store(base, store),
    }


def _own_store(store: StoreAccess) -> dict[str, str]:
    """A torch without libuv refuses to open a store, unless it is told so."""
    return {} if store.libuv else {"USE_LIBUV": "0"}


def _store(base: Mapping[str, str], store: StoreAccess) -> dict[str, str]:
    if not store.hosted:
        return {"TORCHELASTIC_USE_AGENT_STORE": "False", **_own_store(store)}
    if store.libuv and base.get("USE_LIBUV", "1") != "0":
        return {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    # torch's Python code reads only "True" as yes, and then uses libuv whatever USE_LIBUV says. Its C++ code also reads
    # "1" as yes, and lets rank 0 join a store that already listens (torch 2.6 to 2.14).
    return {"TORCHELASTIC_USE_AGENT_STORE": "1", "USE_LIBUV": "0"}


def _agreeing_with_rank(base: Mapping[str, str], place: RankPosition) -> dict[str, str]:
    """Slurm's variables that replace those in `base`, and those that keep Slurm's own values.

    In a step of Slurm a rank has all of them, as srun gives them to a task. Elsewhere only those are replaced that are
    there.
    """
    in_step = "SLURM_STEP_ID" in base
    values = {name: value for name, value in _as_slurm_says(place).items() if in_step or name in base}
    return {**values, **{f"{KEPT_PREFIX}{name}": base[name] for name in values if name in base}}


def _as_slurm_says(place: RankPosition) -> dict[str, str]:
    """What Slurm would say of a rank if it had started the ranks in this order."""
    count, names = str(len(place.nodes)), ",".join(place.nodes)
    each = f"{place.local_world_size}(x{count})" if len(place.nodes) > 1 else str(place.local_world_size)
    first = place.rank - place.local_rank
    return {
        "SLURM_PROCID": str(place.rank),
        "SLURM_LOCALID": str(place.local_rank),
        "SLURM_NODEID": str(place.group_rank),
        "SLURM_GTIDS": ",".join(map(str, range(first, first + place.local_world_size))),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), str(place.world_size)),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES"), count),
        **dict.fromkeys(("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"), names),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), each),
        "SLURM_NTASKS_PER_NODE": str(place.local_world_size),
    }
