"""The plan of a rank's shard: where every leaf of its state is in a slot. Made once for all snapshots.

Names, zip headers, the structure of the state and the metadata are written into a slot once. A snapshot then copies the
tensors' raw bytes to their places and writes the objects, which have room to grow.
"""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from muster.checkpoint.format import layout
from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training import state_tree, torch_items
from muster.checkpoint.training.publication import Publication
from muster.checkpoint.training.replicas import Replicas
from muster.checkpoint.training.training_state import STRUCTURE, CapturedState, StateLeaf

_MIN_OBJECT_BYTES = 256
"""The least room for an object: small objects such as step counters grow without a new plan."""


class ObjectOutgrown(Exception):
    """An object no longer fits its place: a new plan is needed. Its arguments: the object's name and its bytes."""


@dataclass(frozen=True)
class TensorLocation:
    """Where a tensor's item is in the slot. `template`: the bytes around the tensor's data."""

    offset: int
    template: torch_items.TensorTemplate

    @property
    def data_offset(self) -> int:
        """Where the raw bytes begin."""
        return self.offset + len(self.template.prefix)


@dataclass(frozen=True)
class ObjectLocation:
    """Where an object is in the slot: 8 bytes of length at `offset`, then room for `capacity` bytes."""

    offset: int
    capacity: int


TensorKind = tuple[torch.dtype, torch.Size, int]
"""A tensor's dtype, its (local) shape, and the number of the first leaf that shares its memory."""

Signature = list[tuple[state_tree.Path, TensorKind | None]]
"""The path of every leaf; the kind of tensors, None for objects."""


def signature(leaves: list[StateLeaf]) -> Signature:
    """What a plan depends on: paths, dtypes, shapes, and which tensors share memory (tied weights)."""
    first_leaf: dict[tuple[int, torch.dtype, torch.Size, tuple[int, ...]], int] = {}
    found: Signature = []
    for number, leaf in enumerate(leaves):
        kind: TensorKind | None = None
        if isinstance(leaf.value, torch.Tensor):
            value = local_tensor(leaf.value)
            key = (value.data_ptr() or -number, value.dtype, value.shape, value.stride())
            kind = (value.dtype, value.shape, first_leaf.setdefault(key, number))
        found.append((leaf.path, kind))
    return found


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: the local shard of a DTensor, any other tensor itself."""
    return value.to_local() if hasattr(value, "to_local") else value


class ShardPlan:
    """The plan of one rank.

    Args:
        captured: the state to plan for.
        publication: what this rank publishes of the state.
        min_object_bytes: the least room for an object by its name, for objects that have outgrown an earlier plan.
        replicas: the part of the state that is compared with that of other ranks. It lies at the begin of the slot.
    """

    def __init__(
        self,
        captured: CapturedState,
        publication: Publication,
        min_object_bytes: Mapping[str, int],
        replicas: Replicas,
    ) -> None:
        self.signature = signature(captured.leaves)
        self.publication = publication
        self.constants = {STRUCTURE: torch_items.dump_object(state_tree.structure(captured.shared))}
        leaves = captured.leaves
        self.tensors: dict[str, TensorLocation] = {}
        self.objects: dict[str, ObjectLocation] = {}
        self.compared_bytes = self._place_tensors(leaves, 0, replicas.names.__contains__)
        self.replica_group = replicas.group(repr(self._compared_layout()))
        self.objects_offset = self._place_tensors(leaves, self.compared_bytes, lambda name: name not in replicas.names)
        self.header_offset = self._place_objects(leaves, min_object_bytes)
        self._object_locations = [self.objects.get(leaf.name) for leaf in leaves]
        self._header_parts = (self._index(), self._leaf_directory(leaves), publication.metadata)
        header_end = self.header_offset + sum(map(len, self._header_parts))
        self.bytes = layout.align_up(header_end) + layout.FOOTER_BYTES

    def _compared_layout(self) -> list[tuple[str, int, TensorKind | None]]:
        """Where which tensor of the compared part is. Equal in all ranks whose parts can be compared."""
        kinds = {state_tree.name(path): kind for path, kind in self.signature}
        return [(name, location.offset, kinds[name]) for name, location in self.tensors.items()]

    def _place_tensors(self, leaves: list[StateLeaf], end: int, is_placed: Callable[[str], bool]) -> int:
        """Place the tensors that `is_placed` chooses by name, from offset `end` on. Returns where they end."""
        for number, (path, kind) in enumerate(self.signature):
            if kind is None or not is_placed(leaves[kind[2]].name):  # leaves that share memory have one place
                continue
            name = state_tree.name(path)
            dtype, shape, first = kind
            if leaves[number].value.layout != torch.strided:
                raise CheckpointError(f"{name} is no strided tensor: only those can be kept")
            if first == number:
                location = TensorLocation(end, torch_items.tensor_template(dtype, tuple(shape)))
                self.tensors[name] = location
                end = layout.align_up(end + location.template.item_bytes)
            else:
                self.tensors[name] = self.tensors[leaves[first].name]
        return end

    def _place_objects(self, leaves: list[StateLeaf], min_object_bytes: Mapping[str, int]) -> int:
        end = self.objects_offset
        capacities = {name: len(data) for name, data in self.constants.items()}
        for leaf in leaves:
            if leaf.name not in self.tensors:
                twice = 2 * len(torch_items.dump_object(leaf.value))
                capacities[leaf.name] = max(twice, _MIN_OBJECT_BYTES, min_object_bytes.get(leaf.name, 0))
        for name, capacity in capacities.items():
            self.objects[name] = ObjectLocation(end, capacity)
            end = layout.align_up(end + layout.LENGTH_BYTES + capacity)
        return end

    def _index(self) -> bytes:
        rows = []
        for name, number in self.publication.numbers.items():
            if name in self.tensors:
                location = self.tensors[name]
                rows.append(layout.PublishedItem(number, location.offset, location.template.item_bytes))
            else:
                rows.append(layout.PublishedItem(number, self.objects[name].offset, None))
        return layout.ShardIndex(self.publication.rank, self.publication.world_size, tuple(rows)).dump()

    def _leaf_directory(self, leaves: list[StateLeaf]) -> bytes:
        """Where every leaf is in the slot, for a restore from the slot itself."""
        tensors = {
            leaf.name: (
                self.tensors[leaf.name].data_offset,
                local_tensor(leaf.value).dtype,
                tuple(local_tensor(leaf.value).shape),
            )
            for leaf in leaves
            if leaf.name in self.tensors
        }
        spread = {leaf.name: _dtensor_layout(leaf.value) for leaf in leaves if hasattr(leaf.value, "placements")}
        objects = {name: location.offset for name, location in self.objects.items()}
        return pickle.dumps({"tensors": tensors, "spread": spread, "objects": objects}, 4)

    def write_constant_parts(self, slot: memoryview) -> None:
        """Write all bytes that are equal in every snapshot of this plan."""
        for location in self.tensors.values():
            prefix, suffix = location.template.prefix, location.template.suffix
            slot[location.offset : location.data_offset] = prefix
            data_end = location.data_offset + location.template.data_bytes
            slot[data_end : data_end + len(suffix)] = suffix
        for name, data in self.constants.items():
            layout.write_object(slot, self.objects[name].offset, data)
        end = self.header_offset
        for part in self._header_parts:
            slot[end : end + len(part)] = part
            end += len(part)
        index, directory, metadata = map(len, self._header_parts)
        footer = layout.Footer(
            self.objects_offset,
            self.header_offset,
            index,
            directory,
            metadata,
            self.compared_bytes,
            self.replica_group,
            self.publication.sharded,
        )
        layout.write_footer(slot, footer)

    def write_objects(self, slot: memoryview, leaves: list[StateLeaf]) -> None:
        """Write the objects of a snapshot.

        Raises:
            ObjectOutgrown: an object is larger than its place.
        """
        for leaf, location in zip(leaves, self._object_locations, strict=True):
            if location is not None:
                data = torch_items.dump_object(leaf.value)
                if len(data) > location.capacity:
                    raise ObjectOutgrown(leaf.name, len(data))
                layout.write_object(slot, location.offset, data)


def _dtensor_layout(value: Any) -> tuple[Any, ...]:
    """How a DTensor lies over its mesh: placements, shape, stride, and the mesh's shape and dimension names."""
    mesh = value.device_mesh
    return (tuple(value.placements), tuple(value.shape), value.stride(), tuple(mesh.shape), mesh.mesh_dim_names)
