"""Loading the newest durable checkpoint that is not damaged, on all ranks the same.

Each rank reads what it needs, so that one rank may find damage which no other rank sees. After they have loaded, the
ranks tell each other, through the store of their process group.
"""

import itertools
import logging
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from muster.checkpoint.durable.newest import older_checkpoint
from muster.checkpoint.format.errors import CorruptCheckpoint
from muster.checkpoint.training.durable_loading.load_progress import LoadProgress

log = logging.getLogger(__name__)

_LONGEST_LOAD = timedelta(hours=12)
_loads = itertools.count()
"""All ranks load equally often."""


def load_newest_intact(
    load: Callable[[str], int], folder: str, progress: LoadProgress, *, may_be_older: bool
) -> tuple[int, str]:
    """Load the checkpoint `folder`, or the next older one of its gang that no rank finds damaged.

    Args:
        load: loads a checkpoint, and returns its step. It raises CorruptCheckpoint.
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
        step, damage = 0, ""
        try:
            step = load(folder)
        except CorruptCheckpoint as error:
            damage = str(error)
        damage = _damage_on_any_rank(damage)
        if not damage:
            progress.end()
            return step, folder
        if not may_be_older:
            raise CorruptCheckpoint(f"{damage}. To start from another checkpoint, name the folder that it lies in")
        older = older_checkpoint(folder)
        if older is None:
            raise CorruptCheckpoint(f"{damage}, and no older checkpoint of this job is complete")
        log.warning("%s: loading the next older checkpoint, %s", damage, older)
        folder = older


def _damage_on_any_rank(damage: str) -> str:
    """What some rank has found; empty: no rank has found damage."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return damage
    store = dist.PrefixStore(f"muster-load-{next(_loads)}", dist.distributed_c10d._get_default_store())
    if damage:
        store.set("damage", damage)
    if store.add("loaded", 1) == dist.get_world_size():
        store.set("all", "")
    store.wait(["all"], _LONGEST_LOAD)
    return str(store.get("damage").decode()) if store.check(["damage"]) else ""
