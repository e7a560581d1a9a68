"""Tensors of subclasses in a durable checkpoint.

Each is read as it was saved. torch.distributed.checkpoint would copy its values into a tensor that must be there, with
operations that few subclasses have.
"""

from typing import Any

import torch
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training.states.inner_tensors import stand_in


def read_subclasses(
    reader: StorageReader, metadata: Metadata, wanted: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tensors of subclasses, or this rank's shards of them, by the names of their items. No collective call.

    Args:
        reader: of a trusted checkpoint: its pickles are loaded with all that they ask for.
        metadata: of the checkpoint.
        wanted: for each name a tensor of the same shape, that lies over the ranks as the wanted one shall.

    Raises:
        CheckpointError: the checkpoint holds other shards.
    """
    stored = {(index.fqn, tuple(index.offset or ())): index for index in metadata.storage_data}
    items = []
    for name, like in wanted.items():
        index = stored[name, tuple(_offsets(name, like, metadata))]
        nowhere = torch.Size((0,))
        items.append(ReadItem(LoadItemType.BYTE_IO, MetadataIndex(name), nowhere, index, nowhere, nowhere))
    found: dict[str, Any] = dict.fromkeys(wanted)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(found, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(reader.prepare_local_plan(LoadPlan(items)), planner).wait()
    return {name: _laid_out(found[name], like) for name, like in wanted.items()}


def _offsets(name: str, like: Any, metadata: Metadata) -> torch.Size:
    """Where this rank's part of a tensor begins."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({name: stand_in(like)}, is_coordinator=True)
    (item,) = planner.create_local_plan().items
    assert item.tensor_data is not None, "a tensor has data"
    chunk, chunks = item.tensor_data.chunk, metadata.state_dict_metadata[name].chunks
    if not any((each.offsets, each.sizes) == (chunk.offsets, chunk.sizes) for each in chunks):
        raise CheckpointError(
            f"{name} is of a tensor subclass, and was kept in {len(chunks)} other shards: these can't be divided anew; "
            "go on with the layout of the run that wrote the checkpoint"
        )
    offsets: torch.Size = chunk.offsets
    return offsets


def _laid_out(value: torch.Tensor, like: Any) -> torch.Tensor:
    """The tensor on the device, and over the mesh, of another one."""
    if not hasattr(like, "placements"):
        return value.to(like.device)
    from torch.distributed.tensor import DTensor

    local, mesh = value.to(like.device_mesh.device_type), like.device_mesh
    made: torch.Tensor = DTensor.from_local(
        local, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made
