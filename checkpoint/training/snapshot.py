"""Copying a state into slots: one copy a tensor, from where it lives to where the durable file will have it."""

import torch

from muster.checkpoint.training import state_tree
from muster.checkpoint.training.shard_plan import ShardPlan, local
from muster.checkpoint.training.training_state import Leaf


class SnapshotWriter:
    """The slots of one plan.

    Args:
        plan: where everything stands.
        slots: their bytes, as the agent gave them.
    """

    def __init__(self, plan: ShardPlan, slots: list[memoryview]) -> None:
        self.plan = plan
        self._slots = slots
        self._laid: set[int] = set()
        self._views = [self._tensors(slot) for slot in slots]

    def _tensors(self, slot: memoryview) -> list[torch.Tensor | None]:
        """A tensor over each leaf's place; a place that several share (tied weights) is copied once."""
        whole = torch.frombuffer(slot, dtype=torch.uint8)
        views: list[torch.Tensor | None] = []
        for number, (path, kind) in enumerate(self.plan.signature):
            if kind is None or kind[2] != number:
                views.append(None)
                continue
            place = self.plan.tensors[state_tree.name(path)]
            raw = whole[place.data : place.data + place.like.nbytes]
            views.append(raw.view(kind[0]).view(kind[1]))
        return views

    def write(self, slot: int, leaves: list[Leaf]) -> None:
        """Copy a state that the plan was made for into a free slot; all is copied when this returns.

        Raises:
            Outgrown: an object needs a larger layout; nothing counts as written.
        """
        if slot not in self._laid:
            self.plan.lay(self._slots[slot])
            self._laid.add(slot)
        with torch.no_grad():
            for leaf, view in zip(leaves, self._views[slot], strict=True):
                if view is not None:
                    view.copy_(local(leaf.value))
        self.plan.write_objects(self._slots[slot], leaves)
