"""Which durable checkpoint is loaded, on all ranks the same: the one that a path leads to, or the newest before it that
is not damaged."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from muster.checkpoint.durable.newest import older_checkpoint
from muster.checkpoint.format.errors import CheckpointError, CorruptCheckpoint
from muster.checkpoint.training.durable_loading.agreed_damage import ALL, JointLoad
from muster.checkpoint.training.durable_loading.load_progress import LoadProgress
from muster.checkpoint.training.durable_loading.named_checkpoint import find_for_script

log = logging.getLogger(__name__)


def load_newest_intact(
    load: Callable[[str, JointLoad], int], folder: str, progress: LoadProgress, *, may_be_older: bool
) -> tuple[int, str]:
    """Load the checkpoint `folder`, or the next older one of its gang that no rank finds damaged.

    Args:
        load: loads a checkpoint together with the other ranks, and returns its step. It raises CorruptCheckpoint.
        folder: a path or a URL.
        progress: is told which checkpoint is loaded, and the end.
        may_be_older: another checkpoint may be loaded in its place.

    Returns:
        The step, and the checkpoint that was loaded.

    Raises:
        CorruptCheckpoint: it is damaged, and there is no older one, or none may be loaded.
    """
    damage = ""
    while True:
        progress.begin(folder, damage)
        joint = JointLoad()
        try:
            step = joint.read(ALL, partial(load, folder, joint))
        except CorruptCheckpoint as error:
            damage = str(error)
        else:
            progress.end()
            return step, folder
        if not may_be_older:
            raise CorruptCheckpoint(f"{damage}. To start from another checkpoint, name the folder that it lies in")
        older = _same_on_all_ranks(partial(older_checkpoint, folder), folder)
        if older is None:
            raise CorruptCheckpoint(f"{damage}, and no older checkpoint of this job is complete")
        log.warning("%s: loading the next older checkpoint, %s", damage, older)
        folder = older


def find_together(path: str, gang: str) -> str | None:
    """What `find_for_script` finds on rank 0, on all ranks.

    Raises:
        CheckpointError: as `find_for_script` does, on all ranks.
    """
    return _same_on_all_ranks(partial(find_for_script, path, gang), path) if path else None


def _same_on_all_ranks(find: Callable[[], str | None], path: str) -> str | None:
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
