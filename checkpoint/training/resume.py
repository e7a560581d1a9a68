"""Loading a state from the bytes of a shard, from the shards of another number of ranks, or from a durable folder.

The last two are read in the same way, with torch's own planner: they differ in where the bytes are. A durable folder
may have any world size, and need not be written by Muster. It is read only if nobody but the user and root can have
written it (checkpoint/durable/trusted_folder.py), because reading unpickles. Parameters are loaded in place, because an
optimizer and DistributedDataParallel refer to them. An optimizer keeps the tensors that it is given: from the rank's
own shard it gets the bytes of the slot themselves (checkpoint/training/borrowed_pages.py).
"""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

import torch
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from muster.checkpoint.durable.locations import is_url, open_store
from muster.checkpoint.durable.posix_folder import PosixFolder
from muster.checkpoint.durable.trusted_folder import TrustedFolder
from muster.checkpoint.format import layout
from muster.checkpoint.format.errors import CheckpointError, UntrustedCheckpoint
from muster.checkpoint.training.agent_shards import AgentShards
from muster.checkpoint.training.borrowed_pages import BorrowedPages
from muster.checkpoint.training.copies.memory_copy import TensorCopy, copy_tensors, is_plain
from muster.checkpoint.training.durable_loading.agreed_damage import HEAD, JointLoad
from muster.checkpoint.training.durable_loading.checkpoint_files import CheckpointFiles
from muster.checkpoint.training.durable_loading.load_progress import LoadProgress
from muster.checkpoint.training.own_structure import own_structure, without_missing_states
from muster.checkpoint.training.planning import torch_items
from muster.checkpoint.training.shard_reader import ShardReader
from muster.checkpoint.training.states import state_tree
from muster.checkpoint.training.states.differing_names import kept_name, plain_name, why_missing
from muster.checkpoint.training.states.inner_tensors import Recipe, put_together, taken_apart
from muster.checkpoint.training.states.stored_subclasses import read_subclasses
from muster.checkpoint.training.states.training_state import STEP, STRUCTURE, TrainingState


def from_shard(
    states: TrainingState, shard: memoryview, directory: dict[str, Any], rank: int, borrowed: BorrowedPages
) -> int:
    """Load a rank's own shard.

    Args:
        states: the objects to load into.
        shard: the bytes.
        directory: the shard's own (`shard_plan.leaf_directory`).
        rank: this rank.
        borrowed: gives the tensors that are the shard's bytes.

    Returns:
        The number of finished steps.
    """
    dtensor_layouts, objects = directory["spread"], directory["objects"]
    tensors = {name: (None, [place]) for name, place in directory["tensors"].items()} | directory["subclasses"]
    meshes, present = _device_meshes(states), _model_tensors(states)
    values: dict[str, torch.Tensor] = {}
    made: dict[Any, torch.Tensor] = {}
    copies: list[TensorCopy] = []
    for name, (recipe, places) in tensors.items():
        sources = [_borrowed(borrowed, shard, *place) for place in places]
        # A model copies the tensor that it is given, but not onto itself. Other objects keep it.
        if not _is_model(states, name):
            one_in_memory = (_owner(name), places[0][0])
            if one_in_memory not in made:
                made[one_in_memory] = put_together(recipe, iter(sources))
            values[name] = made[one_in_memory]
        elif name not in dtensor_layouts and (targets := _alike(present.get(plain_name(name)), sources, recipe)):
            values[name] = present[plain_name(name)]
            copies += zip(targets, sources, strict=True)
        else:
            values[name] = put_together(recipe, iter(sources))
    copy_tensors(copies)

    part_of = states.parts(directory["structure"])

    def load(name: str) -> Any:
        return torch_items.load_object(layout.read_object(shard, objects[name]))

    def value_of(plain: str) -> Any:
        name = kept_name(plain, part_of(plain))
        if name not in tensors:
            return load(name)
        value = values[name]
        return _as_dtensor(value, dtensor_layouts[name], meshes) if name in dtensor_layouts else value

    def per_rank_value_of(name: str) -> Any:
        key = f"ranks.{rank}.{name}"
        return load(key) if key in objects else None

    states.restore(directory["structure"], value_of, per_rank_value_of)
    return int(load(STEP))


def _is_model(states: TrainingState, name: str) -> bool:
    return isinstance(states.shared.get(_owner(name)), torch.nn.Module)


def _model_tensors(states: TrainingState) -> dict[str, torch.Tensor]:
    """The present tensors of the models, by their names in the state."""
    found: dict[str, Any] = {}
    for key, target in states.shared.items():
        if isinstance(target, torch.nn.Module):
            found |= {f"{key}.{name}": value for name, value in target.state_dict().items()}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def _borrowed(
    borrowed: BorrowedPages, shard: memoryview, start: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """A plain tensor that is its bytes in the shard."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return borrowed.tensor(shard[start : start + count], dtype, shape)


def _alike(present: torch.Tensor | None, kept: list[torch.Tensor], recipe: Recipe | None) -> list[torch.Tensor]:
    """The plain tensors of the present one, if the bytes of the kept ones are what they need; none otherwise."""
    if present is None:
        return []
    parts, present_recipe = taken_apart(present)
    if present_recipe != recipe or len(parts) != len(kept):
        return []
    pairs = zip(parts, kept, strict=True)
    alike = all(is_plain(one) and (one.dtype, one.shape) == (other.dtype, other.shape) for one, other in pairs)
    return parts if alike else []


def _owner(name: str) -> str:
    """The state that a leaf belongs to, by its plain or its kept name."""
    return plain_name(name).split(".", 1)[0]


def _device_meshes(states: TrainingState) -> list[Any]:
    """The device meshes of the models. A shard can be laid over one of these only."""
    found = []
    for target in states.shared.values():
        if isinstance(target, torch.nn.Module):
            tensors = chain(target.parameters(), target.buffers())
            found += [tensor.device_mesh for tensor in tensors if hasattr(tensor, "device_mesh")]
    return found


def _as_dtensor(value: torch.Tensor, dtensor_layout: tuple[Any, ...], meshes: list[Any]) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    placements, shape, stride, mesh_shape, names, ranks = dtensor_layout
    for mesh in meshes:
        found = tuple(mesh.shape), mesh.mesh_dim_names, tuple(mesh.mesh.flatten().tolist())
        if found == (mesh_shape, names, ranks):
            value = value.to(mesh.device_type)
            return DTensor.from_local(value, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    raise CheckpointError(
        f"no model uses the device mesh of the kept state: shape {mesh_shape}, names {names}, ranks {ranks[:8]}"
    )


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
        metadata = reader.read_metadata()
        found = _load_items(states, reader, metadata, _structure(states, reader, metadata), rank)
    return int(found[STEP])


def from_folder(
    states: TrainingState,
    folder: str,
    joint: JointLoad,
    rank: int,
    progress: LoadProgress,
    *,
    trusts_store: bool = False,
) -> int:
    """Load a durable checkpoint. Its world size may differ from the present one.

    Args:
        folder: its path or URL.
        joint: joins this load with those of the other ranks.
        progress: is told how much is needed, and how much was read.
        trusts_store: a store of objects is believed, whoever has written there.

    Returns:
        The number of finished steps.

    Raises:
        UntrustedCheckpoint: others can have written the folder.
        CheckpointError: the folder can't be read, or holds another state.
    """
    try:
        with _open_trusted(folder, progress, trusts_store=trusts_store) as files:
            return _from_trusted_folder(states, files, joint, rank)
    except (OSError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{folder} is no torch.distributed.checkpoint folder: {error}") from error


@contextmanager
def _open_trusted(where: str, progress: LoadProgress, *, trusts_store: bool) -> Iterator[CheckpointFiles]:
    """Open a checkpoint for reading, while the block lasts.

    Args:
        where: its path or URL.
        progress: is told how much is needed, and how much was read.
        trusts_store: a store of objects is believed, whoever has written there.

    Raises:
        UntrustedCheckpoint: others can have written it.
        CorruptCheckpoint: at the end of the block: some byte that was read is not what was written.
        OSError: it is no folder, or can't be read.
    """
    if not is_url(where):
        with (
            TrustedFolder(where) as folder,
            CheckpointFiles(where, PosixFolder(folder.path), folder.check_file, progress) as files,
        ):
            yield files
        return
    if not trusts_store:
        raise UntrustedCheckpoint(
            f"{where} is in a store of objects, which does not say who has written it: it would run as your user if it "
            "were loaded. If only you, or people that you trust, may write there: restore(trust_durable_store=True)"
        )
    with CheckpointFiles(where, open_store(where), _check_name, progress) as files:
        yield files


def _check_name(name: str) -> None:
    if os.path.basename(name) != name:
        raise UntrustedCheckpoint(f"the checkpoint names the file {name!r}, which is not a file of its folder")


def _from_trusted_folder(states: TrainingState, files: CheckpointFiles, joint: JointLoad, rank: int) -> int:
    reader = files.reader()

    def head() -> tuple[Metadata, dict[str, Any]]:
        metadata = reader.read_metadata()
        return metadata, _structure(states, reader, metadata)

    # The ranks exchange names next: one that has found damage must not leave the others there.
    found = _load_items(states, reader, *joint.read(HEAD, head), rank)
    return int(found[STEP]) if STEP in found else files.finished_steps()


def _load_items(
    states: TrainingState, reader: StorageReader, metadata: Metadata, structure: dict[str, Any], rank: int
) -> dict[str, Any]:
    """Load the items of a checkpoint that may have another world size, and return them by name.

    `structure`: of all states in it.
    """
    entries = metadata.state_dict_metadata
    structure = own_structure(states, structure)
    parameters, part_of = states.parameters_by_leaf(structure), states.parts(structure)
    structure = without_missing_states(states, structure, part_of, entries)
    names = {name for key in states.shared for name in state_tree.names(structure.get(key, {}))}
    kept = {name: kept_name(name, part_of(name)) for name in names}
    for name in sorted(names):
        if kept[name] not in entries:
            raise CheckpointError(why_missing(name, part_of(name), entries))
    own = f"ranks.{rank}."
    wanted: dict[str, Any] = {name: None for name in entries if name == STEP or name.startswith(own)}
    present = states.shared_values()
    targets = {kept[n]: _target(n, entries[kept[n]], present, states, parameters.get(n)) for n in names}
    subclasses = {n: targets[n] for n in targets if n in structure.get("muster", {}).get("subclasses", {})}
    wanted |= {name: target for name, target in targets.items() if name not in subclasses}
    _read(reader, metadata, wanted)
    wanted |= read_subclasses(reader, metadata, subclasses) if subclasses else {}

    def per_rank_value_of(name: str) -> Any:
        target = states.per_rank.get(name)
        if f"{own}generators" not in entries and isinstance(target, torch.nn.Module | torch.optim.Optimizer):
            raise CheckpointError(f"the checkpoint holds no {name} of rank {rank}, and those of other ranks differ")
        return wanted.get(own + name)

    states.restore(structure, lambda name: wanted[kept[name]], per_rank_value_of)
    return wanted


def _structure(states: TrainingState, reader: StorageReader, metadata: Metadata) -> dict[str, Any]:
    """The structure of all states in a checkpoint."""
    if STRUCTURE not in metadata.state_dict_metadata:
        return _foreign_structure(metadata, states)
    found: dict[str, Any] = {STRUCTURE: None}
    _read(reader, metadata, found)
    structure: dict[str, Any] = found[STRUCTURE]
    return structure


def _target(
    name: str, entry: Any, present: dict[str, Any], states: TrainingState, parameter: torch.Tensor | None
) -> Any:
    """The tensor to read an item into: the model's own tensor, or a new one. None for an object.

    `parameter`: that to which this tensor of an optimizer's state belongs.
    """
    if not isinstance(entry, TensorStorageMetadata):
        return None
    current = present.get(name) if parameter is None else states.state_of_parameter(name, parameter)
    if isinstance(current, torch.Tensor) and current.shape == entry.size and current.dtype == entry.properties.dtype:
        return current.detach() if _is_model(states, name) else _empty_like(current.detach())
    if parameter is not None and parameter.shape == entry.size:
        return torch.empty_like(parameter.detach(), dtype=entry.properties.dtype)
    if parameter is not None and _is_reduced(entry.size, parameter):
        return _reduced(entry.size, entry.properties.dtype, parameter)
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _is_reduced(size: torch.Size, parameter: Any) -> bool:
    """Whether a state of this size is what operations on a DTensor's rows or columns give: some dimensions are 1."""
    return (
        hasattr(parameter, "placements")
        and len(size) == parameter.dim()
        and all(one in (1, whole) for one, whole in zip(size, parameter.shape, strict=True))
        and any(one == whole > 1 for one, whole in zip(size, parameter.shape, strict=True))
    )


def _reduced(size: torch.Size, dtype: torch.dtype, parameter: Any) -> torch.Tensor:
    """A new DTensor for such a state: over the ranks in the dimensions that it has in common with its parameter."""
    from torch.distributed.tensor import Replicate, Shard, empty

    placements = [
        placement if type(placement) is Shard and size[placement.dim] == parameter.shape[placement.dim] else Replicate()
        for placement in parameter.placements
    ]
    made: torch.Tensor = empty(size, dtype=dtype, device_mesh=parameter.device_mesh, placements=placements)
    return made


def _empty_like(value: torch.Tensor) -> torch.Tensor:
    """A new tensor like this one. What is of a subclass is not read into, so it does: few subclasses can make one."""
    return value if taken_apart(value)[1] is not None else torch.empty_like(value)


def _read(reader: StorageReader, metadata: Metadata, wanted: dict[str, Any]) -> None:
    """Fill `wanted` in place. Every rank reads what it needs, without a collective call."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(wanted, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()


def _foreign_structure(metadata: Metadata, states: TrainingState) -> dict[str, Any]:
    """The structure of a checkpoint that Muster did not write, built from the paths in its metadata."""
    paths = metadata.planner_data or {name: (name,) for name in metadata.state_dict_metadata}
    structure: dict[str, Any] = {}
    for name, path in paths.items():
        _set(structure, list(path), name)
    for key in states.optimizers().keys() & structure.keys():
        if "param_groups" not in structure[key]:
            structure[key] = _nested_by_name(structure[key])
            continue
        numbered = structure[key].get("state", {})
        structure[key]["state"] = {int(k) if str(k).isdigit() else k: v for k, v in numbered.items()}
    return structure


def _nested_by_name(flat: dict[str, str]) -> dict[str, Any]:
    """The structure of an optimizer's state that torch has flattened, with keys such as state.NAME.exp_avg and
    param_groups.NAME.lr. NAME has dots."""
    nested: dict[str, dict[str, Any]] = {"state": {}, "param_groups": {}}
    for key, leaf in flat.items():
        part, _, rest = key.partition(".")
        parameter, _, field = rest.rpartition(".")
        if part in nested:
            nested[part].setdefault(parameter, {})[field] = leaf
    return nested


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
