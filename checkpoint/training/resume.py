"""Loading a state from the bytes of a shard, from the shards of another number of ranks, or from a durable folder.

The last two are read in the same way, with torch's own planner: they differ in where the bytes are. A durable folder
may have any world size, and need not be written by Muster. It is read only if nobody but the user and root can have
written it (checkpoint/format/trusted_folder.py), because reading unpickles. Parameters are loaded in place, because an
optimizer and DistributedDataParallel refer to them. An optimizer keeps the tensors that it is given: from the rank's
own shard it gets the bytes of the slot themselves (checkpoint/training/borrowed_pages.py).
"""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, StorageReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from muster.checkpoint.durable.locations import is_url
from muster.checkpoint.durable.newest import finished_steps_of
from muster.checkpoint.format import durable_folders, layout
from muster.checkpoint.format.errors import CheckpointError, UntrustedCheckpoint
from muster.checkpoint.format.trusted_folder import TrustedFolder
from muster.checkpoint.training import torch_items
from muster.checkpoint.training.borrowed_pages import BorrowedPages
from muster.checkpoint.training.memory_copy import copy_tensors, is_plain
from muster.checkpoint.training.resharding.agent_shards import AgentShards
from muster.checkpoint.training.resharding.shard_reader import ShardReader
from muster.checkpoint.training.training_state import STEP, STRUCTURE, TrainingState


def from_shard(states: TrainingState, shard: memoryview, rank: int, borrowed: BorrowedPages) -> int:
    """Load a rank's own shard. `borrowed` gives the tensors that are the shard's bytes.

    Returns:
        The number of finished steps.
    """
    directory = pickle.loads(layout.read_leaf_directory(shard))
    tensors, dtensor_layouts, objects = directory["tensors"], directory["spread"], directory["objects"]
    meshes, present, values, copies = _device_meshes(states), _model_tensors(states), {}, []
    for name, (start, dtype, shape) in tensors.items():
        count = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
        values[name] = source = borrowed.tensor(shard[start : start + count], dtype, shape)
        # A model copies the tensor that it is given, but not onto itself. Other objects keep it.
        is_copied = _is_model(states, name) and name not in dtensor_layouts
        if is_copied and name in present and _is_alike(present[name], source):
            values[name] = present[name]
            copies.append((values[name], source))
    copy_tensors(copies)

    def value_of(name: str) -> Any:
        if name not in tensors:
            return torch_items.load_object(layout.read_object(shard, objects[name]))
        value = values[name]
        return _as_dtensor(value, dtensor_layouts[name], meshes) if name in dtensor_layouts else value

    def per_rank_value_of(name: str) -> Any:
        key = f"ranks.{rank}.{name}"
        return value_of(key) if key in objects else None

    states.restore(value_of(STRUCTURE), value_of, per_rank_value_of)
    return int(value_of(STEP))


def _is_model(states: TrainingState, name: str) -> bool:
    return isinstance(states.shared.get(name.split(".", 1)[0]), torch.nn.Module)


def _model_tensors(states: TrainingState) -> dict[str, torch.Tensor]:
    """The present tensors of the models, by their names in the state."""
    found: dict[str, Any] = {}
    for key, target in states.shared.items():
        if isinstance(target, torch.nn.Module):
            found |= {f"{key}.{name}": value for name, value in target.state_dict().items()}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _is_alike(present: torch.Tensor, kept: torch.Tensor) -> bool:
    """Whether the bytes of the kept tensor are those that the present one needs."""
    return is_plain(present) and present.dtype == kept.dtype and present.shape == kept.shape


def _device_meshes(states: TrainingState) -> list[Any]:
    """The device meshes of the models. A shard can be laid over one of these only."""
    found = []
    for target in states.shared.values():
        if isinstance(target, torch.nn.Module):
            found += [p.device_mesh for p in target.parameters() if hasattr(p, "device_mesh")]
    return found


def _as_dtensor(value: torch.Tensor, dtensor_layout: tuple[Any, ...], meshes: list[Any]) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    placements, shape, stride, mesh_shape, names = dtensor_layout
    for mesh in meshes:
        if (tuple(mesh.shape), mesh.mesh_dim_names) == (mesh_shape, names):
            value = value.to(mesh.device_type)
            return DTensor.from_local(value, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    raise CheckpointError(f"no model uses the device mesh of the kept state: shape {mesh_shape}, names {names}")


def from_shards(states: TrainingState, shards: AgentShards, rank: int) -> int:
    """Load what another number of ranks holds in memory.

    Returns:
        The number of finished steps.

    Raises:
        RestoreError: the agent can't bring some of it.
        CheckpointError: the shards hold another state.
    """
    with shards:
        reader = ShardReader(shards, copy_tensors)
        found = _load_items(states, reader, reader.read_metadata(), rank, lambda _: None)
    return int(found[STEP])


def from_folder(states: TrainingState, folder: str, rank: int, *, trusts_store: bool = False) -> int:
    """Load a durable checkpoint. Its world size may differ from the present one.

    Args:
        folder: its path or URL.
        trusts_store: a store of objects is believed, whoever has written there.

    Returns:
        The number of finished steps.

    Raises:
        UntrustedCheckpoint: others can have written the folder.
        CheckpointError: the folder can't be read, or holds another state.
    """
    try:
        with _open_trusted(folder, trusts_store=trusts_store) as trusted:
            return _from_trusted_folder(states, folder, trusted, rank)
    except (OSError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder} is no torch.distributed.checkpoint folder: {error}") from error


@dataclass(frozen=True)
class _TrustedCheckpoint:
    """A checkpoint that may be read.

    `check_file`: has to be called before a file is read. It raises UntrustedCheckpoint.
    """

    reader: FileSystemReader
    check_file: Callable[[str], None]


@contextmanager
def _open_trusted(where: str, *, trusts_store: bool) -> Iterator[_TrustedCheckpoint]:
    """Open a checkpoint for reading, while the block lasts.

    Args:
        where: its path or URL.
        trusts_store: a store of objects is believed, whoever has written there.

    Raises:
        UntrustedCheckpoint: others can have written it.
        OSError: it is no folder, or can't be read.
    """
    if not is_url(where):
        with TrustedFolder(where) as folder:
            yield _TrustedCheckpoint(FileSystemReader(folder.path), folder.check_file)
        return
    if not trusts_store:
        raise UntrustedCheckpoint(
            f"{where} is in a store of objects, which does not say who has written it: it would run as your user if it "
            "were loaded. If only you, or people that you trust, may write there: restore(trust_durable_store=True)"
        )
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader  # needs fsspec

    yield _TrustedCheckpoint(FsspecReader(where), _check_name)


def _check_name(name: str) -> None:
    if os.path.basename(name) != name:
        raise UntrustedCheckpoint(f"the checkpoint names the file {name!r}, which is not a file of its folder")


def _from_trusted_folder(states: TrainingState, folder: str, trusted: _TrustedCheckpoint, rank: int) -> int:
    trusted.check_file(durable_folders.METADATA)
    found = _load_items(states, trusted.reader, trusted.reader.read_metadata(), rank, trusted.check_file)
    return int(found[STEP]) if STEP in found else finished_steps_of(folder)


def _load_items(
    states: TrainingState, reader: StorageReader, metadata: Metadata, rank: int, check_file: Callable[[str], None]
) -> dict[str, Any]:
    """Load the items of a checkpoint that may have another world size, and return them by name. `check_file` is told
    the name of each file before it is read."""
    present = {leaf.name: leaf.value for leaf in states.capture(rank, 0).leaves}
    rank_prefix = f"ranks.{rank}." if f"ranks.{rank}.generators" in metadata.state_dict_metadata else "ranks.0."
    wanted = {
        name: _target(name, entry, present, states)
        for name, entry in metadata.state_dict_metadata.items()
        if not name.startswith("ranks.") or name.startswith(rank_prefix)
    }
    _read(reader, metadata, wanted, check_file)

    def per_rank_value_of(name: str) -> Any:
        # Two ranks must not draw the same numbers, so a rank never loads the generators of another rank.
        if name == "generators" and rank_prefix != f"ranks.{rank}.":
            return None
        return wanted.get(rank_prefix + name)

    structure = wanted[STRUCTURE] if STRUCTURE in wanted else _foreign_structure(metadata, states)
    states.restore(structure, wanted.__getitem__, per_rank_value_of)
    return wanted


def _target(name: str, entry: Any, present: dict[str, Any], states: TrainingState) -> Any:
    """The tensor to read an item into: the model's own tensor, or a new one. None for an object."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    current = present.get(name)
    if isinstance(current, torch.Tensor) and current.shape == entry.size and current.dtype == entry.properties.dtype:
        return current.detach() if _is_model(states, name) else torch.empty_like(current.detach())
    parameter = _parameter_of(name, states)
    if parameter is not None and parameter.shape == entry.size:
        return torch.empty_like(parameter.detach(), dtype=entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _parameter_of(name: str, states: TrainingState) -> torch.Tensor | None:
    """The parameter that a tensor of an optimizer's state belongs to; None for other tensors."""
    owner, *path = name.split(".")
    optimizer = states.shared.get(owner)
    if not isinstance(optimizer, torch.optim.Optimizer) or len(path) < 3 or path[0] != "state" or not path[1].isdigit():
        return None
    flat = [p for group in optimizer.param_groups for p in group["params"]]
    return flat[int(path[1])] if int(path[1]) < len(flat) else None


def _read(reader: StorageReader, metadata: Metadata, wanted: dict[str, Any], check_file: Callable[[str], None]) -> None:
    """Fill `wanted` in place. Every rank reads what it needs, without a collective call."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(wanted, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    for name in {metadata.storage_data[item.storage_index].relative_path for item in plan.items}:
        check_file(name)
    reader.read_data(plan, planner).wait()


def _foreign_structure(metadata: Metadata, states: TrainingState) -> dict[str, Any]:
    """The structure of a checkpoint that Muster did not write, built from the paths in its metadata."""
    paths = metadata.planner_data or {name: (name,) for name in metadata.state_dict_metadata}
    structure: dict[str, Any] = {}
    for name, path in paths.items():
        _set(structure, list(path), name)
    for key, target in states.shared.items():
        if isinstance(target, torch.optim.Optimizer) and key in structure:
            numbered = structure[key].get("state", {})
            structure[key]["state"] = {int(k) if str(k).isdigit() else k: v for k, v in numbered.items()}
    return structure


def _set(structure: Any, path: list[str | int], leaf: str) -> None:
    for key, following in pairwise(path):
        container: Any = [] if isinstance(following, int) else {}
        if isinstance(structure, list):
            structure.extend([None] * (int(key) + 1 - len(structure)))
            structure[int(key)] = structure[int(key)] if structure[int(key)] is not None else container
            structure = structure[int(key)]
        else:
            structure = structure.setdefault(key, container)
    if isinstance(structure, list):
        structure.extend([None] * (int(path[-1]) + 1 - len(structure)))
        structure[int(path[-1])] = leaf
    else:
        structure[path[-1]] = leaf
