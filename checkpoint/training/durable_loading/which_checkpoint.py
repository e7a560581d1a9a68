"""Which durable checkpoint a path leads to, the same on all ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training.durable_loading.named_checkpoint import find_for_script


def find_together(path: str, gang: str) -> str | None:
    """What `find_for_script` finds on rank 0, on all ranks.

    Raises:
        CheckpointError: as `find_for_script` does, on all ranks.
    """
    return same_on_all_ranks(partial(find_for_script, path, gang), path) if path else None


def same_on_all_ranks(find: Callable[[], str | None], path: str) -> str | None:
    """The checkpoint that rank 0 finds, on all ranks.

    Another gang may complete a checkpoint there meanwhile, and a cache of a file system may be old, so ranks that
    looked by themselves could differ. `path`: where they look, for errors.

    Raises:
        CheckpointError: rank 0 has raised it, or can't read there. On all ranks.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return find()
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [find()]
        except CheckpointError as error:
            found = [error]
        except OSError as error:  # the other ranks wait
            found = [CheckpointError(f"{path} can't be read: {error}")]
    dist.broadcast_object_list(found)
    if isinstance(found[0], CheckpointError):
        raise found[0]
    return str(found[0]) if found[0] else None
