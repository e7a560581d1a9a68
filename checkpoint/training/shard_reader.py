"""Reads the shards of another number of ranks as torch.distributed.checkpoint reads a folder: a StorageReader.

The metadata is the one that a flush of these shards would write. It says which old rank's file would hold an item; here
that rank's shard holds it, at the place that its leaf directory names. So only the bytes of the parts that this rank
needs are asked for. Objects, and tensors that torch can't divide, are read as whole items, where the index names them.
"""

import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from muster.checkpoint.format import layout
from muster.checkpoint.format.durable_folders import rank_of_file
from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training.agent_shards import AgentShards, ByteSpan

TensorCopy = tuple[torch.Tensor, torch.Tensor]
"""Target and source."""


class _KeptTensor(NamedTuple):
    """A contiguous tensor in a shard, as the leaf directory describes it."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def stride(self) -> list[int]:
        """In elements, dimension by dimension."""
        return [prod(self.shape[dimension + 1 :]) for dimension in range(len(self.shape))]

    def span_of(self, offsets: Iterable[int], lengths: Iterable[int]) -> ByteSpan | None:
        """The bytes from the first to the last element of a part; None: it has no element."""
        size, first, last = self.dtype.itemsize, 0, 0
        for step, offset, length in zip(self.stride, offsets, lengths, strict=True):
            if not length:
                return None
            first, last = first + step * offset, last + step * (offset + length - 1)
        return self.offset + first * size, self.offset + (last + 1) * size

    def part(self, shard: memoryview, offsets: Iterable[int], lengths: Iterable[int]) -> torch.Tensor:
        """A part of the tensor: a view of the shard's bytes."""
        data_bytes = prod(self.shape) * self.dtype.itemsize
        data = torch.frombuffer(shard, dtype=torch.uint8, offset=self.offset, count=data_bytes)
        part = data.view(self.dtype).view(self.shape)
        for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            part = part.narrow(dimension, offset, length)
        return part


class ShardReader(StorageReader):  # type: ignore[misc]  # torch is not there for mypy
    """A StorageReader over the shards that the agent brings. `copy_tensors`: copies sources to targets, (target,
    source) each."""

    def __init__(self, shards: AgentShards, copy_tensors: Callable[[list[TensorCopy]], None]) -> None:
        self._shards = shards
        self._copy_tensors = copy_tensors
        self._metadata = Metadata({})
        self._directories: dict[int, dict[str, Any]] = {}
        self._published: dict[int, dict[int, layout.PublishedItem]] = {}
        """By old rank, and by the number in the metadata: where whole items are."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """There is one checkpoint only."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The metadata that rank 0 of the old ranks has written.

        Raises:
            RestoreError: the agent can't bring it.
            CheckpointError: it can't be read.
        """
        self._shards.bring_headers([0])
        try:
            metadata = pickle.loads(layout.read_durable_metadata(self._shards.view(0)))
        except (EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"the metadata of the kept state can't be read: {error}") from error
        assert isinstance(metadata, Metadata)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Read by this metadata."""
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to prepare."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to prepare."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Bring what the plan needs, and fill the planner's tensors and objects.

        Raises:
            RestoreError: the agent can't bring some of it.
        """
        items: dict[int, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            items[rank_of_file(self._metadata.storage_data[item.storage_index].relative_path)].append(item)
        self._shards.bring_headers(items)
        for rank in items.keys() - self._directories.keys():
            shard = self._shards.view(rank)
            self._directories[rank] = pickle.loads(layout.read_leaf_directory(shard))
            self._published[rank] = {item.number: item for item in layout.read_index(shard).published}
        self._shards.bring({rank: [*self._spans(rank, its_items)] for rank, its_items in items.items()})
        copies: list[TensorCopy] = []
        for rank, its_items in items.items():
            for item in its_items:
                if item.type == LoadItemType.BYTE_IO:
                    item_bytes = layout.published_bytes(self._shards.view(rank), self._whole(rank, item))
                    planner.load_bytes(item, io.BytesIO(item_bytes))
                    continue
                part = self._tensor(rank, item).part(self._shards.view(rank), item.storage_offsets, item.lengths)
                copies.append((planner.resolve_tensor(item).detach(), part))
        self._copy_tensors(copies)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _tensor(self, rank: int, item: ReadItem) -> _KeptTensor:
        return _KeptTensor(*self._directories[rank]["tensors"][item.storage_index.fqn])

    def _whole(self, rank: int, item: ReadItem) -> layout.PublishedItem:
        """Where an item is that is read as a whole: an object, or a tensor that torch can't divide."""
        return self._published[rank][
            layout.number_of_placeholder(self._metadata.storage_data[item.storage_index].offset)
        ]

    def _spans(self, rank: int, items: list[ReadItem]) -> Iterable[ByteSpan]:
        """The bytes that these items of an old rank need. Only an object's own first bytes tell its length, so all
        objects of the rank come together."""
        has_objects = False
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                whole = self._whole(rank, item)
                if whole.length is None:
                    has_objects = True
                else:
                    yield whole.offset, whole.offset + whole.length
            elif (span := self._tensor(rank, item).span_of(item.storage_offsets, item.lengths)) is not None:
                yield span
        if has_objects:
            footer = layout.read_footer(self._shards.view(rank))
            yield footer.objects_offset, footer.header_offset

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """There are no checkpoints with names."""
        return False
