"""The environment of ranks: the variables of torchrun, those of Muster, and Slurm's in the gang's order. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from muster.daemon.agent.ranks.place import slurm_environment
from muster.daemon.agent.ranks.place.slurm_environment import SlurmPosition

# torchrun sets this variable to 1 unless the user sets it. Libraries that read their own variable follow it too.
OMP_THREADS_VARIABLE = "OMP_NUM_THREADS"
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
        "MUSTER_RUN_TOKEN",
        "MUSTER_USER_NAME",
        "GRPC_SSL_CIPHER_SUITES",
        "GRPC_VERBOSITY",
    }
)


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
    kept = {name: value for name, value in environ.items() if name not in _AGENT_VARIABLES}
    return {OMP_THREADS_VARIABLE: "1", **kept, **wanted}


def environment_of_rank(
    base: Mapping[str, str], place: RankPosition, store: StoreAccess, gang: str, run_dir: str
) -> dict[str, str]:
    """The whole environment of one rank, except the number of its socket to the agent."""
    in_slurm = SlurmPosition(
        place.rank, place.local_rank, place.group_rank, place.world_size, place.local_world_size, place.nodes
    )
    return {
        **base,
        **slurm_environment.agreeing(base, in_slurm),
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.group_rank),
        "GROUP_WORLD_SIZE": str(len(place.nodes)),
        "ROLE_RANK": str(place.rank),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(max(place.generation - 1, 0)),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": gang,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "MUSTER_JOB": gang,
        "MUSTER_GENERATION": str(place.generation),
        "MUSTER_RUN_DIR": run_dir,
        "MUSTER_LEAF": place.leaf,
        "MUSTER_NVLINK_DOMAIN": place.nvlink_domain,
        "MUSTER_GROUP_LEVELS": json.dumps(place.group_levels),
        "MUSTER_HOSTFILE": place.host_file,
        **place.devices,
        **_store(base, store),
    }


def _store(base: Mapping[str, str], store: StoreAccess) -> dict[str, str]:
    if not store.hosted:
        return {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    if store.libuv and base.get("USE_LIBUV", "1") != "0":
        return {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    # torch's Python code reads only "True" as yes, and then uses libuv whatever USE_LIBUV says. Its C++ code also reads
    # "1" as yes, and lets rank 0 join a store that already listens (torch 2.6 to 2.14).
    return {"TORCHELASTIC_USE_AGENT_STORE": "1", "USE_LIBUV": "0"}
