"""Writing a snapshot into a slot: each tensor is copied once, to the place where the durable file will have it."""

import torch

from muster.checkpoint.training.copies.memory_copy import TensorCopy, copy_tensors
from muster.checkpoint.training.copies.pinned_memory import PinnedMemory
from muster.checkpoint.training.planning.shard_plan import ShardPlan
from muster.checkpoint.training.states import state_tree
from muster.checkpoint.training.states.training_state import CapturedState


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
        wholes = [torch.frombuffer(slot, dtype=torch.uint8) for slot in slots]
        self._memory = PinnedMemory(wholes)
        self._views = [self._tensor_views(whole) for whole in wholes]

    def _tensor_views(self, whole: torch.Tensor) -> list[list[torch.Tensor]]:
        """For each leaf a tensor over each place of its bytes; none for objects and for tensors that share memory with
        an earlier leaf."""
        views: list[list[torch.Tensor]] = []
        for number, (path, kind) in enumerate(self.plan.signature):
            if kind is None or kind.first != number:
                views.append([])
                continue
            data = self.plan.tensors[state_tree.name(path)].data()
            raw = [whole[start : start + length] for start, length in data]
            views.append([part.view(dtype).view(shape) for part, (dtype, shape) in zip(raw, kind.plain, strict=True)])
        return views

    def write(self, slot: int, captured: CapturedState, late: frozenset[int] = frozenset()) -> list[TensorCopy]:
        """Copy a state of this plan into a free slot.

        Args:
            slot: its number.
            captured: the state.
            late: numbers of the leaves that are copied later.

        Returns:
            Their copies, for `copy`. The slot is complete when these are made.

        Raises:
            ObjectOutgrown: an object needs a larger place. The slot counts as not written.
        """
        if slot not in self._prepared_slots:
            self.plan.write_constant_parts(self._slots[slot])
            self._prepared_slots.add(slot)
        now: list[TensorCopy] = []
        later: list[TensorCopy] = []
        for number, (apart, views) in enumerate(zip(captured.parts, self._views[slot], strict=True)):
            if views and apart is not None:
                (later if number in late else now).extend(zip(views, apart[0], strict=True))
        self.copy(now)
        self.plan.write_objects(self._slots[slot], captured.leaves)
        return later

    def copy(self, copies: list[TensorCopy]) -> None:
        """Copy tensors to their views. Those of a GPU are copied one after the other without waiting for each, those in
        host memory meanwhile."""
        gpus = {tensor.device for _, tensor in copies if tensor.is_cuda}
        pinned = bool(gpus) and self._memory.pin()
        with torch.no_grad():
            for view, tensor in copies:
                if tensor.is_cuda:
                    view.copy_(tensor, non_blocking=pinned)
            copy_tensors([copy for copy in copies if not copy[1].is_cuda], fitting_targets=True)
        for gpu in gpus:
            torch.cuda.current_stream(gpu).synchronize()

    def close(self) -> None:
        """The slots are not used any more, and can be unmapped."""
        self._memory.close()
