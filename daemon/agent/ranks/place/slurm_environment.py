"""Slurm's variables as ranks see them: in the gang's own order of nodes and ranks. Pure.

Slurm numbers the nodes of an allocation in its own order, spares included, and knows of no swap. Scripts and libraries
read its variables, so ranks get values that agree with RANK. Slurm's own value is kept: MUSTER_SLURM_PROCID has that of
SLURM_PROCID.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KEPT_PREFIX = "MUSTER_"
"""In front of the name that keeps Slurm's own value."""


@dataclass(frozen=True, slots=True)
class SlurmPosition:
    """What Slurm would say of a rank if it had started the ranks in this order.

    `nodes`: the nodes that carry ranks, by group rank. `local_world_size`: ranks of each node.
    """

    rank: int
    local_rank: int
    group_rank: int
    world_size: int
    local_world_size: int
    nodes: Sequence[str]


def agreeing(base: Mapping[str, str], place: SlurmPosition) -> dict[str, str]:
    """The variables that replace those in `base`, and those that keep Slurm's values.

    Only variables that Slurm has set are replaced: outside Slurm there are none.
    """
    values = {name: value for name, value in _values(place).items() if name in base}
    return {**values, **{f"{KEPT_PREFIX}{name}": base[name] for name in values}}


def _values(place: SlurmPosition) -> dict[str, str]:
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
