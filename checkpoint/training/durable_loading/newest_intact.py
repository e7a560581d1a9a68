"""Loading the newest durable checkpoint that is not damaged, on all ranks the same."""

import logging
from collections.abc import Callable
from functools import partial

from muster.checkpoint.durable.newest import older_checkpoint
from muster.checkpoint.format.errors import CorruptCheckpoint
from muster.checkpoint.training.durable_loading.agreed_damage import ALL, JointLoad
from muster.checkpoint.training.durable_loading.load_progress import LoadProgress
from muster.checkpoint.training.durable_loading.which_checkpoint import same_on_all_ranks

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
        older = same_on_all_ranks(partial(older_checkpoint, folder), folder)
        if older is None:
            raise CorruptCheckpoint(f"{damage}, and no older checkpoint of this job is complete")
        log.warning("%s: loading the next older checkpoint, %s", damage, older)
        folder = older
