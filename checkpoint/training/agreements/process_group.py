"""The default process group: who this rank is, and what it tells the others."""

import functools
import importlib.util
import os
from typing import Any

import torch.distributed as dist

from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training.agreements.joint_planning import RanksWithStore


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


def all_gathered(value: Any) -> list[Any]:
    """What each rank has given, in the order of the ranks. A collective call."""
    _, world_size = rank_and_world_size()
    gathered: list[Any] = [value] * world_size
    if world_size > 1:
        dist.all_gather_object(gathered, value)
    return gathered


def gathered_on_first(value: Any) -> list[Any]:
    """On rank 0 what each rank has given, in the order of the ranks; nothing on other ranks. A collective call."""
    rank, world_size = rank_and_world_size()
    gathered: list[Any] = [value] * world_size
    if world_size > 1:
        dist.gather_object(value, gathered if rank == 0 else None)
    return gathered if rank == 0 else []


def sent_by(sender: int, value: Any) -> Any:
    """What the rank `sender` has given. A collective call."""
    sent = [value]
    if rank_and_world_size()[1] > 1:
        dist.broadcast_object_list(sent, src=sender)
    return sent[0]


def store_for(purpose: str) -> dist.PrefixStore:
    """The group's store, with keys of their own for a purpose. There is one only if there are several ranks."""
    return dist.PrefixStore(f"muster-{purpose}", dist.distributed_c10d._get_default_store())


def ranks_with_store(purpose: str) -> RanksWithStore | None:
    """This rank among all, with the store for a purpose; None if it is alone."""
    rank, world_size = rank_and_world_size()
    return None if world_size == 1 else RanksWithStore(rank, world_size, store_for(purpose))
