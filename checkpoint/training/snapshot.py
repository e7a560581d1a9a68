"""Writing a snapshot into a slot: each tensor is copied once, to the place where the durable file will have it."""

import torch

from muster.checkpoint.training import state_tree
from muster.checkpoint.training.shard_plan import ShardPlan, local_tensor
from muster.checkpoint.training.training_state import StateLeaf


class SnapshotWriter:
    """Writes snapshots of one plan.

    Args:
        plan: where each leaf of the state is in a slot.
        slots: the bytes of the slots that the agent gave.
    """

    def __init__(self, plan: ShardPlan, slots: list[memoryview]) -> None:
        self.plan = plan
        self._slots = slots
        self._prepared_slots: set[int] = set()
        self._views = [self._tensor_views(slot) for slot in slots]

    def _tensor_views(self, slot: memoryview) -> list[torch.Tensor | None]:
        """A tensor over each leaf's place; None for objects and for tensors that share memory with an earlier leaf."""
        whole = torch.frombuffer(slot, dtype=torch.uint8)
        views: list[torch.Tensor | None] = []
        for number, (path, kind) in enumerate(self.plan.signature):
            if kind is None or kind[2] != number:
                views.append(None)
                continue
            location = self.plan.tensors[state_tree.name(path)]
            raw = whole[location.data_offset : location.data_offset + location.template.data_bytes]
            views.append(raw.view(kind[0]).view(kind[1]))
        return views

    def write(self, slot: int, leaves: list[StateLeaf]) -> None:
        """Copy a state of this plan into a free slot. The copy is complete when this returns.

        Raises:
            ObjectOutgrown: an object needs a larger place. The slot counts as not written.
        """
        if slot not in self._prepared_slots:
            self.plan.write_constant_parts(self._slots[slot])
            self._prepared_slots.add(slot)
        with torch.no_grad():
            for leaf, view in zip(leaves, self._views[slot], strict=True):
                if view is not None:
                    view.copy_(local_tensor(leaf.value))
        self.plan.write_objects(self._slots[slot], leaves)
