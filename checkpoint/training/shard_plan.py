"""A rank's layout: where every leaf of its state stands in a slot. Planned once; a snapshot then only copies.

Names, zip headers, the structure and the metadata are laid into a slot once. A snapshot copies the tensors' raw bytes
into their places and writes the objects, which have room to grow.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from muster.checkpoint.format import layout
from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training import state_tree, torch_items
from muster.checkpoint.training.publication import Publication
from muster.checkpoint.training.training_state import STRUCTURE, CapturedState, Leaf

_OBJECT_ROOM = 256


class ObjectOutgrown(Exception):
    """An object no longer fits its place: lay out anew."""


@dataclass(frozen=True)
class TensorLocation:
    """A tensor's item: it begins at `offset`; `like` is what stands around the data."""

    offset: int
    like: torch_items.TensorTemplate

    @property
    def data(self) -> int:
        """Where the raw bytes begin."""
        return self.offset + len(self.like.head)


@dataclass(frozen=True)
class ObjectLocation:
    """An object's place: 8 bytes of length at `offset`, then `room` bytes."""

    offset: int
    room: int


Kind = tuple[torch.dtype, torch.Size, int]
"""A tensor's dtype and (local) shape, and the place in the list of the first leaf that shares its memory."""

Signature = list[tuple[state_tree.Path, Kind | None]]


def signature(leaves: list[Leaf]) -> Signature:
    """What a layout depends on: paths, dtypes, shapes, and which tensors are one (tied weights)."""
    first: dict[tuple[int, torch.dtype, torch.Size, tuple[int, ...]], int] = {}
    found: Signature = []
    for number, leaf in enumerate(leaves):
        kind: Kind | None = None
        if isinstance(leaf.value, torch.Tensor):
            value = local(leaf.value)
            key = (value.data_ptr() or -number, value.dtype, value.shape, value.stride())
            kind = (value.dtype, value.shape, first.setdefault(key, number))
        found.append((leaf.path, kind))
    return found


def local(value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: its shard where it is a DTensor."""
    return value.to_local() if hasattr(value, "to_local") else value


class ShardPlan:
    """The layout of one rank.

    Args:
        captured: the state to lay out.
        publication: what this rank publishes of it.
        room: least room for an object, by name; for those that have grown.
    """

    def __init__(self, captured: CapturedState, publication: Publication, room: Mapping[str, int]) -> None:
        self.signature = signature(captured.leaves)
        self.publication = publication
        self.constants = {STRUCTURE: torch_items.dump_object(state_tree.structure(captured.shared))}
        leaves = captured.leaves
        self.tensors: dict[str, TensorLocation] = {}
        self.objects: dict[str, ObjectLocation] = {}
        self.cut = self._place_tensors(leaves)
        self.header = self._place_objects(leaves, room)
        self._order = [self.objects.get(leaf.name) for leaf in leaves]
        self._tail = (self._index(), self._directory(leaves), publication.metadata)
        body = self.header + sum(map(len, self._tail))
        self.bytes = layout.align_up(body) + layout.FOOTER_BYTES

    def _place_tensors(self, leaves: list[Leaf]) -> int:
        edge = 0
        for number, (path, kind) in enumerate(self.signature):
            if kind is None:
                continue
            dtype, shape, first = kind
            if leaves[number].value.layout != torch.strided:
                raise CheckpointError(f"{state_tree.name(path)} is no strided tensor: only those can be kept")
            if first == number:
                self.tensors[state_tree.name(path)] = TensorLocation(
                    edge, torch_items.tensor_template(dtype, tuple(shape))
                )
                edge = layout.align_up(edge + self.tensors[state_tree.name(path)].like.bytes)
            else:
                self.tensors[state_tree.name(path)] = self.tensors[leaves[first].name]
        return edge

    def _place_objects(self, leaves: list[Leaf], room: Mapping[str, int]) -> int:
        edge = self.cut
        sizes = {name: len(data) for name, data in self.constants.items()}
        for leaf in leaves:
            if leaf.name not in self.tensors:
                sizes[leaf.name] = max(
                    2 * len(torch_items.dump_object(leaf.value)), _OBJECT_ROOM, room.get(leaf.name, 0)
                )
        for name, size in sizes.items():
            self.objects[name] = ObjectLocation(edge, size)
            edge = layout.align_up(edge + layout.LENGTH_BYTES + size)
        return edge

    def _index(self) -> bytes:
        rows = []
        for name, number in self.publication.numbers.items():
            if name in self.tensors:
                place = self.tensors[name]
                rows.append(layout.PublishedItem(number, place.offset, place.like.bytes))
            else:
                rows.append(layout.PublishedItem(number, self.objects[name].offset, None))
        return layout.ShardIndex(self.publication.rank, self.publication.world_size, tuple(rows)).dump()

    def _directory(self, leaves: list[Leaf]) -> bytes:
        """Where every leaf stands, for restoring from the slot itself."""
        tensors = {
            leaf.name: (self.tensors[leaf.name].data, local(leaf.value).dtype, tuple(local(leaf.value).shape))
            for leaf in leaves
            if leaf.name in self.tensors
        }
        spread = {leaf.name: _spread(leaf.value) for leaf in leaves if hasattr(leaf.value, "placements")}
        objects = {name: place.offset for name, place in self.objects.items()}
        return pickle.dumps({"tensors": tensors, "spread": spread, "objects": objects}, 4)

    def lay(self, slot: memoryview) -> None:
        """Write all that stays alike from snapshot to snapshot."""
        for place in self.tensors.values():
            head, tail = place.like.head, place.like.tail
            slot[place.offset : place.data] = head
            end = place.data + place.like.nbytes
            slot[end : end + len(tail)] = tail
        for name, data in self.constants.items():
            layout.write_object(slot, self.objects[name].offset, data)
        edge = self.header
        for part in self._tail:
            slot[edge : edge + len(part)] = part
            edge += len(part)
        layout.write_footer(slot, layout.Footer(self.cut, self.header, *map(len, self._tail)))

    def write_objects(self, slot: memoryview, leaves: list[Leaf]) -> None:
        """Write the objects.

        Raises:
            Outgrown: one is too large for its place; args: its name and size in bytes.
        """
        for leaf, place in zip(leaves, self._order, strict=True):
            if place is not None:
                data = torch_items.dump_object(leaf.value)
                if len(data) > place.room:
                    raise ObjectOutgrown(leaf.name, len(data))
                layout.write_object(slot, place.offset, data)


def _spread(value: Any) -> tuple[Any, ...]:
    """How a DTensor lies over its mesh: placements, shape, stride, and the mesh's shape and names."""
    mesh = value.device_mesh
    return (tuple(value.placements), tuple(value.shape), value.stride(), tuple(mesh.shape), mesh.mesh_dim_names)
