"""Loading a state: from the bytes of a shard, or from a durable folder (at any world size, also one that Muster didn't
write).

Parameters are loaded in place, so that an optimizer and DistributedDataParallel keep hold of them. What an object
would keep as it is given (an optimizer's state) is a copy of its own: a slot is written again later.
"""

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from muster.checkpoint.format import durable_folders, layout
from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training import torch_items
from muster.checkpoint.training.training_state import STEP, STRUCTURE, TrainingState


def from_shard(states: TrainingState, shard: memoryview, rank: int) -> int:
    """Load a rank's own shard.

    Returns:
        The number of finished steps.
    """
    directory = pickle.loads(layout.read_leaf_directory(shard))
    tensors, spread, objects = directory["tensors"], directory["spread"], directory["objects"]
    whole = torch.frombuffer(shard, dtype=torch.uint8)
    meshes = _meshes(states)

    def value_of(name: str) -> Any:
        if name not in tensors:
            return torch_items.load_object(layout.read_object(shard, objects[name]))
        start, dtype, shape = tensors[name]
        count = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
        value = whole[start : start + count].view(dtype).view(shape)
        # A model copies what it is given; others keep it.
        value = value if _is_model(states, name) else value.clone()
        return _global(value, spread[name], meshes) if name in spread else value

    def own_of(name: str) -> Any:
        key = f"ranks.{rank}.{name}"
        return value_of(key) if key in objects else None

    states.reinstate(value_of(STRUCTURE), value_of, own_of)
    return int(value_of(STEP))


def _is_model(states: TrainingState, name: str) -> bool:
    return isinstance(states.shared.get(name.split(".", 1)[0]), torch.nn.Module)


def _meshes(states: TrainingState) -> list[Any]:
    """The device meshes in use: a shard can't be laid over any other."""
    found = []
    for target in states.shared.values():
        if isinstance(target, torch.nn.Module):
            found += [p.device_mesh for p in target.parameters() if hasattr(p, "device_mesh")]
    return found


def _global(value: torch.Tensor, spread: tuple[Any, ...], meshes: list[Any]) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    placements, shape, stride, mesh_shape, names = spread
    for mesh in meshes:
        if (tuple(mesh.shape), mesh.mesh_dim_names) == (mesh_shape, names):
            value = value.to(mesh.device_type)
            return DTensor.from_local(value, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    raise CheckpointError(f"no model lies over a mesh of shape {mesh_shape} named {names}, as when the state was kept")


def from_folder(states: TrainingState, folder: Path, rank: int) -> int:
    """Load a durable checkpoint; its world size may be another.

    Returns:
        The number of finished steps.

    Raises:
        CheckpointError: it can't be read, or holds another state.
    """
    reader = FileSystemReader(folder)
    try:
        metadata = reader.read_metadata()
    except (OSError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder} is no torch.distributed.checkpoint folder: {error}") from error
    present = {leaf.name: leaf.value for leaf in states.capture(rank, 0).leaves}
    own = f"ranks.{rank}." if f"ranks.{rank}.generators" in metadata.state_dict_metadata else "ranks.0."
    wanted = {
        name: _target(name, entry, present, states)
        for name, entry in metadata.state_dict_metadata.items()
        if not name.startswith("ranks.") or name.startswith(own)
    }
    _read(reader, metadata, wanted)

    def own_of(name: str) -> Any:
        # Two ranks must not draw the same numbers: the generators are a rank's own or none.
        if name == "generators" and own != f"ranks.{rank}.":
            return None
        return wanted.get(own + name)

    shape = wanted[STRUCTURE] if STRUCTURE in wanted else _foreign_structure(metadata, states)
    states.reinstate(shape, wanted.__getitem__, own_of)
    return int(wanted[STEP]) if STEP in wanted else durable_folders.finished_steps_of(folder)


def _target(name: str, entry: Any, present: dict[str, Any], states: TrainingState) -> Any:
    """Memory for a tensor to be read into; a model's own, laid out as the model's."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    now = present.get(name)
    if isinstance(now, torch.Tensor) and now.shape == entry.size and now.dtype == entry.properties.dtype:
        return now.detach() if _is_model(states, name) else torch.empty_like(now.detach())
    like = _parameter_of(name, states)
    if like is not None and like.shape == entry.size:
        return torch.empty_like(like.detach(), dtype=entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _parameter_of(name: str, states: TrainingState) -> torch.Tensor | None:
    """The parameter that a tensor of an optimizer's state belongs to."""
    owner, *path = name.split(".")
    optimizer = states.shared.get(owner)
    if not isinstance(optimizer, torch.optim.Optimizer) or len(path) < 3 or path[0] != "state" or not path[1].isdigit():
        return None
    flat = [p for group in optimizer.param_groups for p in group["params"]]
    return flat[int(path[1])] if int(path[1]) < len(flat) else None


def _read(reader: FileSystemReader, metadata: Metadata, wanted: dict[str, Any]) -> None:
    """Fill `wanted` in place, without any collective call: every rank reads what it needs."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(wanted, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _foreign_structure(metadata: Metadata, states: TrainingState) -> dict[str, Any]:
    """The structure of a checkpoint that Muster didn't write: as its paths say."""
    paths = metadata.planner_data or {name: (name,) for name in metadata.state_dict_metadata}
    shape: dict[str, Any] = {}
    for name, path in paths.items():
        _set(shape, list(path), name)
    for key, target in states.shared.items():
        if isinstance(target, torch.optim.Optimizer) and key in shape:
            numbered = shape[key].get("state", {})
            shape[key]["state"] = {int(k) if str(k).isdigit() else k: v for k, v in numbered.items()}
    return shape


def _set(shape: Any, path: list[str | int], leaf: str) -> None:
    for key, following in pairwise(path):
        fresh: Any = [] if isinstance(following, int) else {}
        if isinstance(shape, list):
            shape.extend([None] * (int(key) + 1 - len(shape)))
            shape[int(key)] = shape[int(key)] if shape[int(key)] is not None else fresh
            shape = shape[int(key)]
        else:
            shape = shape.setdefault(key, fresh)
    if isinstance(shape, list):
        shape.extend([None] * (int(path[-1]) + 1 - len(shape)))
        shape[int(path[-1])] = leaf
    else:
        shape[path[-1]] = leaf
