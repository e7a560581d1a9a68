"""What one rank finds of a durable checkpoint, told to all ranks: they load the same one, or none.

Each rank reads what it needs, so that one rank may find damage which no other rank sees. The ranks tell each other
through the store of their process group, twice in each load: before they wait for each other, and at the end.
"""

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from muster.checkpoint.format.errors import CorruptCheckpoint
from muster.checkpoint.training.agreements.process_group import store_for

Found = TypeVar("Found")

LONGEST_LOAD = timedelta(hours=12)
HEAD, ALL = "head", "all"
"""What is read: metadata and structure, and then everything."""
_loads = itertools.count()
"""All ranks load equally often."""


class JointLoad:
    """One load of a checkpoint, on all ranks at the same time."""

    def __init__(self) -> None:
        self._number = next(_loads)
        self._left = [HEAD, ALL]

    def read(self, what: str, read: Callable[[], Found]) -> Found:
        """What this rank has read, if no rank has found damage. HEAD is read within ALL.

        Raises:
            CorruptCheckpoint: some rank has found damage, or could not read.
            Exception: what `read` has raised.
        """
        try:
            found = read()
        except CorruptCheckpoint as error:
            raise CorruptCheckpoint(self._tell(what, str(error))) from error
        except Exception as error:
            self._tell(what, f"a rank could not read: {error}")  # no other rank shall wait for this one
            raise
        if damage := self._tell(what, ""):
            raise CorruptCheckpoint(damage)
        return found

    def _tell(self, what: str, damage: str) -> str:
        """Tell the other ranks what this rank has found. Returns what some rank has found.

        A rank that failed early also answers for the earlier parts of the load that it has not reached: the others wait
        for its answer there.
        """
        found = damage
        while self._left and what in self._left:
            found = damage_on_any_rank(f"{self._number}-{self._left.pop(0)}", damage) or found
        return found


def damage_on_any_rank(load: str, damage: str) -> str:
    """What some rank has found; empty: no rank has found damage. All ranks call this, with the same name of a load."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return damage
    store = store_for(f"load-{load}")
    if damage:
        store.set("damage", damage)
    if store.add("loaded", 1) == dist.get_world_size():
        store.set("all", "")
    store.wait(["all"], LONGEST_LOAD)
    return str(store.get("damage").decode()) if store.check(["damage"]) else ""
