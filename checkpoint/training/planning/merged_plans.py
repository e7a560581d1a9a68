"""Merges what all ranks hold into the metadata of the durable format, on rank 0.

The lowest rank publishes an item that several hold. The metadata has placeholders for the offsets and lengths that a
flush fills in. torch's own planner is not used: it compares each part of many tensors with each other one. For the
parts of a thousand ranks that may take half an hour.
"""

import math
import pickle
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from muster.checkpoint.format import durable_folders, layout

_FORMAT_VERSION = "1.0.0"

Numbers = tuple[int, ...]
Paths = dict[str, Any]
"""The path of each item in the state, by the item's name."""


class TensorPart(NamedTuple):
    """The part of a tensor that a rank holds, and the size of the whole tensor."""

    offsets: Numbers
    sizes: Numbers
    whole: Numbers
    properties: TensorProperties

    def overlaps(self, other: "TensorPart") -> bool:
        """Whether both hold some element."""
        sides = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(max(one, two) < min(one + length, two + width) for one, length, two, width in sides)


class HeldItems(NamedTuple):
    """Items that a rank holds, by their names: parts of tensors, and None for objects. And the paths of all."""

    parts: list[tuple[str, TensorPart | None]]
    paths: Paths


class Held(NamedTuple):
    """What a rank holds.

    `shared`: of the state of all ranks; None: the same as a rank before it, which publishes it. `own`: of the states
    that differ from rank to rank. `has_dtensors`: some of it are DTensors.
    """

    shared: HeldItems | None
    own: HeldItems
    has_dtensors: bool

    @property
    def parts(self) -> list[tuple[str, TensorPart | None]]:
        """All items, in their order."""
        return [*(self.shared.parts if self.shared is not None else ()), *self.own.parts]


class RankNumbers(NamedTuple):
    """The numbers of a rank's items in the metadata: those that it publishes are numbered from `first` on.

    `published`: for each of its items, in their order, 1 if it publishes it, else 0; None: it publishes all.
    """

    first: int
    published: bytes | None

    def by_name(self, held: Held) -> dict[str, int]:
        """The number of each item that the rank publishes."""
        names = [name for name, _ in held.parts]
        if self.published is not None:
            names = [name for name, is_published in zip(names, self.published, strict=True) if is_published]
        return {name: self.first + place for place, name in enumerate(names)}


class Merged(NamedTuple):
    """The numbers of every rank; the metadata; whether the ranks hold different parts of one state."""

    numbers: list[RankNumbers]
    metadata: bytes
    sharded: bool


def merge(held: Sequence[Held]) -> Merged | str:
    """Merge what the ranks hold; the reason if it makes no checkpoint. `held`: of each rank."""
    merging = _Merging()
    numbers: list[RankNumbers] = []
    for rank, rank_held in enumerate(held):
        names = [name for name, _ in rank_held.parts]
        if len(set(names)) < len(names):
            twice = next(name for place, name in enumerate(names) if name in names[:place])
            return f"rank {rank} holds several shards of {twice}: only DTensors are supported"
        numbers.append(merging.add(durable_folders.rank_file_name(rank), rank_held))
    if wrong := merging.why_not_whole():
        return wrong
    return Merged(numbers, pickle.dumps(merging.metadata(), 4), _is_sharded(held))


class _Merging:
    """The metadata of the ranks that were added so far."""

    def __init__(self) -> None:
        self._parts: defaultdict[str, list[TensorPart]] = defaultdict(list)
        self._state: dict[str, STORAGE_TYPES] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._paths: Paths = {}
        self._sizes: dict[Numbers, torch.Size] = {}
        """Equal sizes are one object, because pickle writes each object once."""

    def add(self, file: str, held: Held) -> RankNumbers:
        """Add what the next rank holds, of which it will publish what no rank before it holds, in `file`."""
        first, published = len(self._storage), bytearray()
        for name, part in held.parts:
            index = (
                MetadataIndex(name, self._size(part.offsets), len(self._parts[name])) if part else MetadataIndex(name)
            )
            published.append(index not in self._storage)
            if published[-1]:
                number = len(self._storage)
                place = layout.offset_placeholder(number), layout.length_placeholder(number)
                self._storage[index] = _StorageInfo(file, *place)
                self._describe(name, part)
        for items in (held.shared, held.own):
            self._paths |= items.paths if items is not None else {}
        return RankNumbers(first, None if all(published) else bytes(published))

    def _describe(self, name: str, part: TensorPart | None) -> None:
        if part is None:
            self._state[name] = BytesStorageMetadata()
            return
        self._parts[name].append(part)
        tensor = self._state.setdefault(name, TensorStorageMetadata(part.properties, self._size(part.whole), []))
        tensor.chunks.append(ChunkStorageMetadata(self._size(part.offsets), self._size(part.sizes)))

    def _size(self, numbers: Numbers) -> torch.Size:
        size = self._sizes.get(numbers)
        if size is None:
            size = self._sizes[numbers] = torch.Size(numbers)
        return size

    def why_not_whole(self) -> str:
        """The first tensor whose parts are not the whole tensor, each element once; empty: there is none."""
        return next((wrong for name, parts in self._parts.items() if (wrong := _why_not_whole(name, parts))), "")

    def metadata(self) -> Metadata:
        """All that was added."""
        metadata = Metadata(self._state, self._paths, self._storage)
        if hasattr(metadata, "version"):
            metadata.version = _FORMAT_VERSION
        return metadata


def _why_not_whole(name: str, parts: list[TensorPart]) -> str:
    whole = parts[0].whole
    for part in parts:
        if part.whole != whole:
            return f"{name} has the shape {list(whole)} on one rank, and {list(part.whole)} on another"
        if any(offset + size > end for offset, size, end in zip(part.offsets, part.sizes, whole, strict=True)):
            return f"a rank's part of {name} lies outside of it: {_text(part)}, of {list(whole)}"
    held, all_elements = sum(math.prod(part.sizes) for part in parts), math.prod(whole)
    if held != all_elements:
        return f"the ranks hold {held} elements of {name}, which has {all_elements}"
    if both := _overlapping(parts):
        return f"two ranks hold the same elements of {name}: {' and '.join(map(_text, both))}"
    return ""


def _text(part: TensorPart) -> str:
    return f"{list(part.sizes)} elements from {list(part.offsets)} on"


def _overlapping(parts: list[TensorPart]) -> tuple[TensorPart, TensorPart] | None:
    """Two parts that hold the same element. Each is compared with those that begin before its end, along the dimension
    in which most begin apart: with few others."""
    filled = [part for part in parts if math.prod(part.sizes)]
    if len(filled) < 2:
        return None
    along = max(range(len(filled[0].offsets)), key=lambda dim: len({part.offsets[dim] for part in filled}))
    beside: list[TensorPart] = []
    for part in sorted(filled, key=lambda part: part.offsets[along]):
        beside = [other for other in beside if other.offsets[along] + other.sizes[along] > part.offsets[along]]
        if (overlapping := next(filter(part.overlaps, beside), None)) is not None:
            return overlapping, part
        beside.append(part)
    return None


def _is_sharded(held: Sequence[Held]) -> bool:
    """Whether the ranks hold DTensors, or different items of the state of all: stages of a pipeline do."""
    shared = [rank_held.shared.paths.keys() for rank_held in held if rank_held.shared is not None]
    return any(rank_held.has_dtensors for rank_held in held) or any(names != shared[0] for names in shared)
