"""Which part of the state must be equal, bit by bit, in which ranks: parameters, and the optimizer states of these.

Data-parallel replicas apply equal gradients to equal parameters, so both stay equal. What may differ is left out:

- Buffers. The running statistics of a BatchNorm layer differ from rank to rank at the end of each step.
- Parameters that DistributedDataParallel was told to ignore.
- The states of a ZeroRedundancyOptimizer: each rank has those of other parameters.
- Tensors of which the user says that they differ.
- DTensors. A shard has no replica, or not in all ranks.
- Python objects, such as the parameter groups of an optimizer, and everything that is kept per rank.

The replicas of a model in DistributedDataParallel are the ranks of its process group; those of any other model are all
ranks.
"""

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from muster.checkpoint.training.states.optimizer_states import ParameterNames, is_sharded, parameters_of
from muster.checkpoint.training.states.training_state import StateLeaf, TrainingState


@dataclass(frozen=True)
class Replicas:
    """The part of this rank's state that is compared. `names`: of its leaves; `ranks`: the ranks that hold replicas of
    them. Both are empty if nothing is compared."""

    names: frozenset[str] = frozenset()
    ranks: tuple[int, ...] = ()

    def group(self, layout: str) -> int:
        """The number of the replica group, 64 bits; 0: none. `layout`: where which leaf is. Ranks whose layouts differ
        are not compared."""
        if not self.names:
            return 0
        key = f"{self.ranks} {layout}".encode()
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") or 1


def find_replicas(states: TrainingState, leaves: list[StateLeaf], world_size: int) -> Replicas:
    """What is compared of a state. Models with different replicas are not compared at all."""
    models = {key: model for key, model in states.wrapped.items() if isinstance(model, torch.nn.Module)}
    groups = {_ranks(model, world_size) for key, model in models.items() if key in states.shared}
    if len(groups) != 1 or len(ranks := groups.pop()) < 2:
        return Replicas()
    compared: set[int] = set()
    names: set[str] = set()
    for key, model in models.items():
        if key in states.shared:
            parameters = dict(_replicated_parameters(model, states.shared[key]))
            compared |= {id(parameter) for parameter in parameters.values()}
            names |= {f"{key}.{name}" for name in parameters}
    labels = states.parameter_names()
    for key, optimizer in states.optimizers().items():
        if not is_sharded(optimizer):
            names |= _state_names(key, optimizer, compared, labels, leaves)
    tensors = {leaf.name for leaf in leaves if _is_plain_tensor(leaf.value)}
    return Replicas(frozenset(names & tensors), ranks)


def _ranks(model: Any, world_size: int) -> tuple[int, ...]:
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, DistributedDataParallel):
        return tuple(dist.get_process_group_ranks(model.process_group))
    return tuple(range(world_size))


def _replicated_parameters(wrapped: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters by name. Tied ones have several names."""
    ignored = _ignored(wrapped)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in ignored:
            yield name, parameter


def _ignored(wrapped: Any) -> Collection[str]:
    """The names of the parameters that DistributedDataParallel was told to ignore."""
    found: Collection[str] = getattr(getattr(wrapped, "_orig_mod", wrapped), "parameters_to_ignore", ())
    return found


def ignored_by_ddp(states: TrainingState) -> set[str]:
    """The leaves of models that DistributedDataParallel was told to ignore."""
    return {f"{key}.{name}" for key in states.models() for name in _ignored(states.wrapped[key])}


def _state_names(
    key: str, optimizer: torch.optim.Optimizer, compared: set[int], labels: ParameterNames, leaves: list[StateLeaf]
) -> set[str]:
    """The names of the optimizer's states that belong to the parameters in `compared`."""
    wanted: set[str] = set()
    for number, parameter in enumerate(parameters_of(optimizer)):
        if id(parameter) in compared:
            wanted |= {str(number), labels[id(parameter)]}
    states = (leaf for leaf in leaves if leaf.path[:2] == (key, "state") and len(leaf.path) > 2)
    return {leaf.name for leaf in states if str(leaf.path[2]) in wanted}


def _is_plain_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not hasattr(value, "placements")
