"""Which durable checkpoint a path leads to, the same on all ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from muster.checkpoint.durable import locations
from muster.checkpoint.durable.newest import newest_checkpoint
from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.errors import CheckpointError


def find_together(path: str) -> str | None:
    """The checkpoint that rank 0 finds at `path`, on all ranks.

    Raises:
        CheckpointError: as `find` does, on all ranks.
    """
    return same_on_all_ranks(partial(find, path), path) if path else None


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


def find(path: str) -> str | None:
    """The checkpoint that a path leads to; None if there is none yet.

    If the path names a version that is not there, a newer version of the same gang beside it is found: a flush of a
    running gang may write a newer version than its order names. A name without a gang leads to no other folder.

    Raises:
        CheckpointError: the path names one checkpoint, and neither that checkpoint nor a newer one is complete.
    """
    if not path:
        return None
    place, name = locations.split(path)
    named = durable_folders.parse_folder_name(name)
    found = newest_checkpoint(path)
    if found is not None or named is None:
        return found
    newest = newest_checkpoint(place, named.gang) if named.gang else None
    label = durable_folders.parse_folder_name(locations.split(newest)[1]) if newest is not None else None
    if label is None or label.version <= named.version:
        raise CheckpointError(f"{path} is no complete checkpoint: it has no {durable_folders.METADATA}")
    return newest
