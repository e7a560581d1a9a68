"""What a checkpoint holds: the user's objects by name, and which of them are one for all ranks.

Models, optimizers, schedulers and gradient scalers hold the same in every replica (or a shard each, as DTensors):
they are kept under their own names. A sampler's cursor, the random generators and whatever else has a state differ
from rank to rank: each rank's stand under `ranks.R`, as one object.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training import random_generators, state_tree

RESERVED = ("ranks", "muster")
STEP = "muster.step"
STRUCTURE = "muster.structure"


class Stateful(Protocol):
    """Whatever can say its state and take it back."""

    def state_dict(self) -> Any:
        """The state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take a state back."""


@dataclass(frozen=True)
class Leaf:
    """One value of the state."""

    path: state_tree.Path
    value: Any

    @property
    def name(self) -> str:
        """As the durable format names it."""
        return state_tree.name(self.path)


@dataclass(frozen=True)
class CapturedState:
    """A state at one moment: its leaves (tensors are the live ones, not copies), and the shared nest they came from."""

    leaves: list[Leaf]
    shared: dict[str, Any]


def bare(model: Any) -> Any:
    """The model inside DistributedDataParallel and torch.compile: its names are those that plain torch loads."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(model, torch.nn.Module) and hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


class TrainingState:
    """The user's objects.

    Args:
        named: by the names that the checkpoint gives them.
        per_rank: names whose state differs from rank to rank; None: all but models, optimizers, schedulers and scalers.

    Raises:
        CheckpointError: a name is taken, or an object has no state.
    """

    def __init__(self, named: Mapping[str, Any], per_rank: Collection[str] | None = None) -> None:
        for key, value in named.items():
            if key in RESERVED or "." in key:
                raise CheckpointError(
                    f"{key!r} can't name a state: {' and '.join(RESERVED)} are taken, and dots separate"
                )
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                kind = type(value).__name__
                raise CheckpointError(
                    f"{key} is a {kind} without state_dict() and load_state_dict(): give it both, or leave it out"
                )
        own = {k for k, v in named.items() if not _alike(v)} if per_rank is None else set(per_rank)
        if unknown := own - named.keys():
            raise CheckpointError(f"per_rank names {sorted(unknown)}, which are not among the states {sorted(named)}")
        self.wrapped = dict(named)
        self.shared: dict[str, Any] = {k: bare(v) for k, v in named.items() if k not in own}
        self.own: dict[str, Any] = {k: bare(v) for k, v in named.items() if k in own}

    def capture(self, rank: int, step: int) -> "CapturedState":
        """Every leaf of the present state: the shared ones first, then this rank's own."""
        shared = {key: value.state_dict() for key, value in self.shared.items()}
        found = [Leaf(path, value) for path, value in state_tree.leaves(shared)]
        found.append(Leaf(("muster", "step"), step))
        found += [Leaf(("ranks", str(rank), key), value.state_dict()) for key, value in self.own.items()]
        found.append(Leaf(("ranks", str(rank), "generators"), random_generators.capture()))
        return CapturedState(found, shared)

    def reinstate(self, shape: Any, value_of: Callable[[str], Any], own_of: Callable[[str], Any]) -> None:
        """Load a state.

        Args:
            shape: the shared state's structure, by name.
            value_of: the value of a shared leaf by its name; raises KeyError.
            own_of: this rank's own state by name, or "generators"; None where there is none.
        """
        for key, target in self.shared.items():
            if key not in shape:
                raise CheckpointError(f"the checkpoint holds {sorted(shape)}, and no {key}")
            _load(target, state_tree.fill(shape[key], value_of))
        for key, target in self.own.items():
            state = own_of(key)
            if state is not None:
                target.load_state_dict(state)
        state = own_of("generators")
        if state is not None:
            random_generators.reinstate(state)

    def data_parallel(self) -> bool:
        """Whether any model is a DistributedDataParallel that rebuilds its buckets after the first backward pass."""
        models = [m for m in self.wrapped.values() if isinstance(m, DistributedDataParallel)]
        return any(not m.find_unused_parameters for m in models)

    def forget_gradients(self) -> None:
        """Set all gradients to None."""
        for target in self.wrapped.values():
            if isinstance(target, torch.nn.Module | torch.optim.Optimizer):
                target.zero_grad(set_to_none=True)


def _alike(value: Any) -> bool:
    kinds = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)
    return isinstance(value, kinds)


def _load(target: Any, state: Any) -> None:
    if isinstance(target, torch.nn.Module):
        # The modules' format numbers travel as an attribute that a plain dict doesn't have.
        present = target.state_dict()
        taken = type(present)(state)
        taken._metadata = present._metadata
        target.load_state_dict(taken)
        return
    if not isinstance(target, torch.optim.Optimizer):
        target.load_state_dict(state)
        return
    target.load_state_dict(state)
    _keep_dtypes(target, state)


def _keep_dtypes(optimizer: Any, state: Any) -> None:
    """Undo the optimizer's cast of its state to the parameter's dtype: what it computed with is what it gets back."""
    packed = optimizer.state_dict()
    flat = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for group in packed["param_groups"] for n in group["params"]]
    for number, parameter in zip(numbers, flat, strict=True):
        for key, saved in state["state"].get(number, {}).items():
            now = optimizer.state[parameter].get(key)
            if isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != saved.dtype:
                optimizer.state[parameter][key] = saved.to(device=now.device)
