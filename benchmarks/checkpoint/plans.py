"""What rank 0 does before the first snapshot of a job: it merges what all ranks hold. Beside it torch's own planner."""

from __future__ import annotations

import gc
import pickle
import time
import zlib

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from benchmarks.checkpoint.figures import SECONDS, Rows
from muster.checkpoint.training.planning.merged_plans import Held, HeldItems, Merged, TensorPart, merge

RANKS, TENSORS = 128, 500
_ROWS_OF_A_RANK, _COLUMNS = 4, 4096
_MOST_ROUNDS = 3

MERGED = f"plan of {RANKS} ranks with parts of {TENSORS} tensors, on rank 0, once in a job"
BY_TORCH = "  the same by torch's own planner, once in each of its saves"


def measure(rows: Rows, rounds: int) -> None:
    """Merge the parts of tensors of which each rank holds some rows, as under FSDP2."""
    held = [_held(rank) for rank in range(RANKS)]
    packed = [zlib.compress(pickle.dumps(one)) for one in held]
    pickled_plans = [pickle.dumps(SavePlan([_write_item(name, part) for name, part in one.parts])) for one in held]
    for _ in range(min(rounds, _MOST_ROUNDS)):
        gc.disable()  # as in a snapshot
        began = time.monotonic()
        merged = merge([pickle.loads(zlib.decompress(one)) for one in packed])
        rows.add(MERGED, SECONDS, time.monotonic() - began)
        gc.enable()
        assert isinstance(merged, Merged), merged
        planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        planner.set_up_planner({}, is_coordinator=True)
        began = time.monotonic()
        planner.create_global_plan([pickle.loads(plan) for plan in pickled_plans])
        rows.add(BY_TORCH, SECONDS, time.monotonic() - began)


def _held(rank: int) -> Held:
    properties = TensorProperties(dtype=torch.float32)
    offsets, sizes = (rank * _ROWS_OF_A_RANK, 0), (_ROWS_OF_A_RANK, _COLUMNS)
    part = TensorPart(offsets, sizes, (RANKS * _ROWS_OF_A_RANK, _COLUMNS), properties)
    names = [f"model.layers.{number}.weight" for number in range(TENSORS)]
    return Held(HeldItems([(name, part) for name in names], {name: name.split(".") for name in names}), _NOTHING, True)


_NOTHING = HeldItems([], {})


def _write_item(name: str, part: TensorPart | None) -> WriteItem:
    assert part is not None
    chunk = ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes))
    data = TensorWriteData(chunk, part.properties, torch.Size(part.whole))
    return WriteItem(MetadataIndex(name, part.offsets), WriteItemType.SHARD, tensor_data=data)
