"""Which rank's file publishes which item. The ranks agree on it once, with torch.distributed.checkpoint's own planners.

Every rank describes what it holds. Rank 0 merges the descriptions into the metadata of the durable format, with
placeholders for the offsets and lengths that a flush fills in. The lowest rank publishes an item that several hold.
"""

import dataclasses
import functools
import importlib.util
import os
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan

from muster.checkpoint.format import durable_folders, layout
from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training.states import state_tree
from muster.checkpoint.training.states.inner_tensors import stand_in
from muster.checkpoint.training.states.training_state import StateLeaf

_FORMAT_VERSION = "1.0.0"


@dataclasses.dataclass(frozen=True)
class Publication:
    """What this rank publishes.

    `numbers`: for the name of each item in this rank's file, its number in the metadata.
    `metadata`: the metadata of the durable format on rank 0; empty on other ranks.
    `sharded`: the ranks hold different parts of one state: DTensors, or other items.
    """

    rank: int
    world_size: int
    numbers: dict[str, int]
    metadata: bytes
    sharded: bool = False


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the world size.

    Raises:
        CheckpointError: there are other ranks, and no process group or no numpy to communicate with them.
    """
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() > 1 and not _has_numpy():
            raise CheckpointError("numpy is missing: PyTorch needs it when ranks exchange objects; pip install numpy")
        return dist.get_rank(), dist.get_world_size()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise CheckpointError(
            f"WORLD_SIZE is {world} and torch.distributed is not initialised: "
            "call init_process_group before the first step"
        )
    return 0, 1


@functools.cache
def _has_numpy() -> bool:
    return importlib.util.find_spec("numpy") is not None


def plan_publication(leaves: list[StateLeaf]) -> Publication:
    """Agree with all ranks of the default process group on what each publishes. A collective call.

    Raises:
        CheckpointError: the ranks' states don't make one checkpoint.
    """
    rank, world_size = rank_and_world_size()
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    planner.set_up_planner({leaf.name: _describe(leaf.value) for leaf in leaves}, is_coordinator=rank == 0)
    paths: dict[str, state_tree.Path] = {}
    for leaf in leaves:
        if leaf.name in paths:
            raise CheckpointError(
                f"two values have the name {leaf.name}: a key contains a dot, or both 1 and '1' are keys"
            )
        paths[leaf.name] = leaf.path
    local = dataclasses.replace(planner.create_local_plan(), planner_data=paths)
    has_dtensors = any(hasattr(leaf.value, "placements") for leaf in leaves)
    gathered: list[Any] = [(local, has_dtensors)] * world_size
    if world_size > 1:
        dist.gather_object((local, has_dtensors), gathered if rank == 0 else None)
    outcome: list[Any] = [_merge(planner, gathered) if rank == 0 else None]
    if world_size > 1:
        dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], str):
        raise CheckpointError(f"the ranks' states don't make one checkpoint: {outcome[0]}")
    numbers, metadata, sharded = outcome[0]
    return Publication(rank, world_size, numbers[rank], metadata if rank == 0 else b"", sharded)


def _describe(value: Any) -> Any:
    # A planner only needs to know that an object is no tensor.
    return stand_in(value) if isinstance(value, torch.Tensor) else None


def _merge(
    planner: DefaultSavePlanner, described: list[tuple[SavePlan, bool]]
) -> tuple[list[dict[str, int]], bytes, bool] | str:
    """On rank 0: the item numbers of every rank, the metadata, and whether the ranks hold different parts of one state;
    or the reason why there are none. `described`: the plan of each rank, and whether it has DTensors."""
    plans = [plan for plan, _ in described]
    sharded = any(has_dtensors for _, has_dtensors in described) or not _hold_the_same(plans)
    try:
        merged, metadata = planner.create_global_plan(plans)
    except (ValueError, AssertionError) as error:
        return str(error)
    numbers: list[dict[str, int]] = []
    storage: dict[Any, Any] = {}
    count = 0
    for rank, plan in enumerate(merged):
        rank_numbers: dict[str, int] = {}
        for item in plan.items:
            if item.index.fqn in rank_numbers:
                return f"rank {rank} holds several shards of {item.index.fqn}: only DTensors are supported"
            rank_numbers[item.index.fqn] = count
            storage[item.index] = _StorageInfo(
                durable_folders.rank_file_name(rank), layout.offset_placeholder(count), layout.length_placeholder(count)
            )
            count += 1
        numbers.append(rank_numbers)
    metadata.planner_data = {name: path for plan in plans for name, path in plan.planner_data.items()}
    metadata.storage_data = storage
    if hasattr(metadata, "version"):
        metadata.version = _FORMAT_VERSION
    return numbers, pickle.dumps(metadata, 4), sharded


def _hold_the_same(plans: list[SavePlan]) -> bool:
    """Whether all ranks hold the same items, apart from their own under `ranks.R`. Stages of a pipeline do not."""
    shared = [{name for name in plan.planner_data if not name.startswith("ranks.")} for plan in plans]
    return all(names == shared[0] for names in shared)
