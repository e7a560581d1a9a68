"""The plan of a rank's shard: where every leaf of its state is in a slot. Made once for all snapshots.

Names, zip headers, the structure of the state and the metadata are written into a slot once. A snapshot then copies the
tensors' raw bytes to their places and writes the objects, which have room to grow.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from muster.checkpoint.format import layout
from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training.planning import torch_items
from muster.checkpoint.training.planning.publication import Publication
from muster.checkpoint.training.states import state_tree
from muster.checkpoint.training.states.inner_tensors import Recipe
from muster.checkpoint.training.states.replicas import Replicas
from muster.checkpoint.training.states.training_state import STRUCTURE, CapturedState, StateLeaf

_MIN_OBJECT_BYTES = 256
"""The least room for an object: small objects such as step counters grow without a new plan."""


class ObjectOutgrown(Exception):
    """An object no longer fits its place: a new plan is needed. Its arguments: the object's name and its bytes."""


@dataclass(frozen=True)
class TensorLocation:
    """Where a tensor's item is in the slot. `template`: the bytes around the tensor's data."""

    offset: int
    template: torch_items.TensorTemplate

    def data(self) -> Iterator[tuple[int, int]]:
        """Where the raw bytes of each plain tensor begin, and how many they are."""
        return ((self.offset + start, length) for start, length in self.template.data)


@dataclass(frozen=True)
class ObjectLocation:
    """Where an object is in the slot: 8 bytes of length at `offset`, then room for `capacity` bytes."""

    offset: int
    capacity: int


PlainKind = tuple[torch.dtype, tuple[int, ...]]
"""A plain tensor's dtype and shape."""


class TensorKind(NamedTuple):
    """What a plan depends on of a tensor: dtype and shape of the plain tensors that it consists of, how they are put
    together (None: it is a plain one), and the number of the first leaf that shares its memory."""

    plain: tuple[PlainKind, ...]
    recipe: Recipe | None
    first: int


Signature = list[tuple[state_tree.Path, TensorKind | None]]
"""The path of every leaf; the kind of tensors, None for objects."""


def signature(captured: CapturedState) -> Signature:
    """What a plan depends on: paths, dtypes, shapes, and which tensors share memory (tied weights).

    Raises:
        CheckpointError: a tensor can't be kept.
    """
    first_leaf: dict[Any, int] = {}
    found: Signature = []
    for number, (leaf, apart) in enumerate(zip(captured.leaves, captured.parts, strict=True)):
        kind: TensorKind | None = None
        if apart is not None:
            parts, recipe = apart
            key = tuple(_memory(part) or (number, "none") for part in parts)
            plain = tuple((part.dtype, tuple(part.shape)) for part in parts)
            kind = TensorKind(plain, recipe, first_leaf.setdefault(key, number))
        found.append((leaf.path, kind))
    return found


def first_change(before: Signature, now: Signature) -> str:
    """The name of the first leaf that is new, gone, or of another kind."""
    old = {path: kind and (kind.plain, kind.recipe) for path, kind in before}
    new = {path: kind and (kind.plain, kind.recipe) for path, kind in now}
    changed = [path for path in new if path not in old] or [path for path in old if path not in new]
    changed += [path for path, kind in new.items() if path in old and old[path] != kind]
    return state_tree.name(changed[0]) if changed else "which tensors share memory"


def _memory(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Equal for tensors that are one in memory, and so have equal values; None for a tensor without bytes."""
    if not tensor.numel():
        return None
    views = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), views)


class ShardPlan:
    """The plan of one rank.

    Args:
        captured: the state to plan for.
        publication: what this rank publishes of the state.
        min_object_bytes: the least room for an object by its name, for objects that have outgrown an earlier plan.
        replicas: the part of the state that is compared with that of other ranks. It lies at the begin of the slot.
        published_structure: the structure that a durable checkpoint holds. None: that of this rank's state.
    """

    def __init__(
        self,
        captured: CapturedState,
        publication: Publication,
        min_object_bytes: Mapping[str, int],
        replicas: Replicas,
        published_structure: Any = None,
    ) -> None:
        self.signature = signature(captured)
        self.publication = publication
        self._structure = state_tree.structure(captured.shared)
        self.constants = {STRUCTURE: torch_items.dump_object(published_structure or self._structure)}
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
        self.bytes = layout.slot_bytes(layout.align_up(header_end) + layout.FOOTER_BYTES)

    def _compared_layout(self) -> list[tuple[str, int, TensorKind | None]]:
        """Where which tensor of the compared part is. Equal in all ranks whose parts can be compared."""
        kinds = {state_tree.name(path): kind for path, kind in self.signature}
        return [(name, location.offset, kinds[name]) for name, location in self.tensors.items()]

    def _place_tensors(self, leaves: list[StateLeaf], end: int, is_placed: Callable[[str], bool]) -> int:
        """Place the tensors that `is_placed` chooses by name, from offset `end` on. Returns where they end."""
        for number, (path, kind) in enumerate(self.signature):
            if kind is None or not is_placed(leaves[kind.first].name):  # leaves that share memory have one place
                continue
            name = state_tree.name(path)
            if kind.first == number:
                location = TensorLocation(end, _template(name, kind))
                self.tensors[name] = location
                end = layout.align_up(end + location.template.item_bytes)
            else:
                self.tensors[name] = self.tensors[leaves[kind.first].name]
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
        tensors, subclasses = {}, {}
        for leaf, (_, kind) in zip(leaves, self.signature, strict=True):
            if kind is not None:
                starts = (start for start, _ in self.tensors[leaf.name].data())
                places = [(start, *of) for start, of in zip(starts, kind.plain, strict=True)]
                if kind.recipe is None:
                    (tensors[leaf.name],) = places
                else:
                    subclasses[leaf.name] = (kind.recipe, places)
        ranks_of: dict[Any, tuple[int, ...]] = {}  # pickle writes a tuple that comes again once
        spread = {
            leaf.name: _dtensor_layout(leaf.value, ranks_of) for leaf in leaves if hasattr(leaf.value, "placements")
        }
        objects = {name: location.offset for name, location in self.objects.items()}
        directory = {"tensors": tensors, "subclasses": subclasses, "spread": spread, "objects": objects}
        agreed = {"structure": self._structure, "publication": self.publication.without_metadata()}
        return pickle.dumps({**directory, **agreed}, 4)

    def write_constant_parts(self, slot: memoryview) -> None:
        """Write all bytes that are equal in every snapshot of this plan.

        Also those that mean nothing: the slot may have held a state of another plan, and replicas must be equal.
        """
        for location in self.tensors.values():
            for start, data in location.template.fixed:
                slot[location.offset + start : location.offset + start + len(data)] = data
            _clear(slot, location.offset + location.template.item_bytes)
        for name, data in self.constants.items():
            layout.write_object(slot, self.objects[name].offset, data)
        end = self.header_offset
        for part in self._header_parts:
            slot[end : end + len(part)] = part
            end += len(part)
        slot[end : len(slot) - layout.FOOTER_BYTES] = bytes(len(slot) - layout.FOOTER_BYTES - end)
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


def leaf_directory(shard: memoryview) -> dict[str, Any]:
    """Where every leaf is in a shard, and what else its plan has written for a restore."""
    directory: dict[str, Any] = pickle.loads(layout.read_leaf_directory(shard))
    return directory


def _clear(slot: memoryview, end: int) -> None:
    """Clear what is left between the end of an item and the next place where one may begin."""
    slot[end : layout.align_up(end)] = bytes(layout.align_up(end) - end)


def _template(name: str, kind: TensorKind) -> torch_items.TensorTemplate:
    if kind.recipe is None:
        return torch_items.tensor_template(*kind.plain[0])
    try:
        pickle.dumps(kind.recipe)
        return torch_items.item_template(kind.recipe, kind.plain)
    except (CheckpointError, pickle.PicklingError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{name} is a {kind.recipe.kind.__name__}, which can't be kept: {error}") from error


def _dtensor_layout(value: Any, ranks_of: dict[Any, tuple[int, ...]]) -> tuple[Any, ...]:
    """How a DTensor lies over its mesh: placements, shape, stride, and the mesh's shape, dimension names and ranks."""
    mesh = value.device_mesh
    ranks = ranks_of.setdefault(mesh, tuple(mesh.mesh.flatten().tolist()))
    return (tuple(value.placements), tuple(value.shape), value.stride(), tuple(mesh.shape), mesh.mesh_dim_names, ranks)
