"""What a checkpoint holds: the user's objects by name, and which of them all ranks share.

Models, optimizers, schedulers and gradient scalers hold the same state in every replica, or a shard each as DTensors.
So do samplers that count finished steps. All these are shared and kept under their own names; names under which ranks
hold different tensors are declared (differing_names.py). All other objects, for example a data loader, and the random
generators differ from rank to rank. They are kept per rank under `ranks.R`, each as one object.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training.states import optimizer_states, random_generators, state_tree
from muster.checkpoint.training.states.differing_names import PREFIX, DifferingNames, Part, plain_name
from muster.checkpoint.training.states.inner_tensors import Recipe, taken_apart
from muster.checkpoint.training.states.optimizer_states import ParameterNames

log = logging.getLogger(__name__)

RESERVED = ("ranks", "muster", PREFIX)
STEP = "muster.step"
STRUCTURE = "muster.structure"


@runtime_checkable
class StepCounter(Protocol):
    """A sampler whose state follows from the finished steps, and is equal on all ranks: a ShardedSampler, or a user's
    own."""

    def finish_steps(self, steps: int) -> Any:
        """Count steps that all ranks have finished."""


@dataclass(frozen=True)
class StateLeaf:
    """One value of the state."""

    path: state_tree.Path
    value: Any

    @property
    def name(self) -> str:
        """The leaf's name in the durable format."""
        return state_tree.name(self.path)


@dataclass(frozen=True)
class CapturedState:
    """A state at one moment: its leaves, and the shared nested state that they belong to. Tensors are not copied."""

    leaves: list[StateLeaf]
    shared: dict[str, Any]

    @cached_property
    def parts(self) -> list[tuple[list[torch.Tensor], Recipe | None] | None]:
        """For each leaf its plain tensors, and how they are put together (`taken_apart`); None: it is an object.

        Raises:
            CheckpointError: a tensor can't be kept.
        """
        with torch.no_grad():
            return [
                taken_apart(leaf.value, leaf.name) if isinstance(leaf.value, torch.Tensor) else None
                for leaf in self.leaves
            ]


def unwrapped(model: Any) -> Any:
    """The model inside DistributedDataParallel and torch.compile, so that its names are those of the plain model."""
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
        objects: by their names in the checkpoint.
        per_rank: names of the objects whose state differs from rank to rank. None: all but models, optimizers,
            schedulers, gradient scalers and samplers that count steps.
        differs_in: names of shared tensors that differ between the ranks of a group (see DifferingNames).

    Raises:
        CheckpointError: a name is reserved, or an object has no state, or one that can't be kept.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        per_rank: Collection[str] | None = None,
        differs_in: Mapping[str, Any] | None = None,
    ) -> None:
        kept = random_generators.KeptGenerator
        objects = {key: kept(value) if kept.fits(value) else value for key, value in objects.items()}
        for key, value in objects.items():
            if key in RESERVED or "." in key:
                raise CheckpointError(
                    f"{key!r} can't name a state: {', '.join(RESERVED)} are reserved, and a name has no dots"
                )
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                kind = type(value).__name__
                raise CheckpointError(
                    f"{key} is a {kind} without state_dict() and load_state_dict(): give it both, or leave it out"
                )
            if _has_uncounted_sampler(value, objects.values()):
                raise CheckpointError(
                    f"{key} reads what a sampler deals that counts finished steps, and that nobody would tell of them: "
                    "give Checkpoint the sampler in place of the loader, as in Checkpoint(sampler=sampler)"
                )
        per_rank_names = {k for k, v in objects.items() if not _is_shared(v)} if per_rank is None else set(per_rank)
        if unknown := per_rank_names - objects.keys():
            raise CheckpointError(f"per_rank names {sorted(unknown)}, which are not among the states {sorted(objects)}")
        self.wrapped = dict(objects)
        self.shared: dict[str, Any] = {k: unwrapped(v) for k, v in objects.items() if k not in per_rank_names}
        self.per_rank: dict[str, Any] = {k: unwrapped(v) for k, v in objects.items() if k in per_rank_names}
        self.by_name: frozenset[str] = frozenset()
        """The optimizers whose states are kept by the names of parameters: ranks optimize different ones."""
        self._differing = DifferingNames(differs_in or {}, self.shared)

    def models(self) -> dict[str, torch.nn.Module]:
        """The models that all ranks share, by name."""
        return {key: value for key, value in self.shared.items() if isinstance(value, torch.nn.Module)}

    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers that all ranks share, by name."""
        return {key: value for key, value in self.shared.items() if isinstance(value, torch.optim.Optimizer)}

    def parameter_names(self) -> dict[int, str]:
        """The names of the models' parameters, by id()."""
        return optimizer_states.parameter_names(self.models())

    def parameters_by_leaf(self, structure: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The parameter to which each leaf of the optimizers' states belongs. `structure`: of all shared states."""
        names, found = self.parameter_names(), dict[str, torch.Tensor]()
        for key, optimizer in self.optimizers().items():
            found |= optimizer_states.parameters_by_leaf(optimizer, structure.get(key), names)
        return found

    def state_of_parameter(self, name: str, parameter: torch.Tensor) -> Any:
        """The present value of a leaf of an optimizer's state; None if there is none."""
        owner, _, path = name.partition(".")
        return optimizer_states.owner(self.shared[owner]).state.get(parameter, {}).get(path.rpartition(".")[2])

    def described(self, leaf: str, shared: Mapping[str, Any]) -> str:
        """A leaf's name and, if it belongs to a parameter, that one's. `shared`: the present state."""
        parameter = self.parameters_by_leaf(state_tree.structure(shared)).get(plain_name(leaf))
        name = self.parameter_names().get(id(parameter))
        return leaf if name is None else f"{leaf} (of the parameter {name})"

    def parts(self, structure: Mapping[str, Any]) -> Callable[[str], Part | None]:
        """A function of the plain name of a shared leaf: which part of it this rank holds, None if the name means the
        same on all ranks. States of an optimizer follow their parameters. `structure`: of all shared states."""
        if not self._differing:
            return lambda name: None
        of_model = {
            id(p): f"{key}.{name}" for key, model in self.models().items() for name, p in model.named_parameters()
        }
        leaves = {leaf: of_model.get(id(parameter)) for leaf, parameter in self.parameters_by_leaf(structure).items()}
        return lambda name: self._differing.part_of(name, leaves.get(name))

    def capture(self, rank: int, step: int) -> "CapturedState":
        """Every leaf of the present state: the shared leaves first, then those of this rank."""
        shared = self._shared_state()
        part_of = self.parts(state_tree.structure(shared) if self._differing else {})
        found = [
            StateLeaf(path if (part := part_of(state_tree.name(path))) is None else (PREFIX, part.label, *path), value)
            for path, value in state_tree.leaves(shared)
        ]
        found.append(StateLeaf(("muster", "step"), step))
        found += [StateLeaf(("ranks", str(rank), key), value.state_dict()) for key, value in self.per_rank.items()]
        found.append(StateLeaf(("ranks", str(rank), "generators"), random_generators.capture()))
        return CapturedState(found, shared)

    def shared_values(self) -> dict[str, Any]:
        """The present value of each leaf that all ranks share, by its plain name. Objects of this rank's own are not
        asked for their states: before a restore, some have none."""
        return {state_tree.name(path): value for path, value in state_tree.leaves(self._shared_state())}

    def _shared_state(self) -> dict[str, Any]:
        names = self.parameter_names() if self.by_name else None
        return {key: self._state_of(key, value, names) for key, value in self.shared.items()}

    def _state_of(self, key: str, value: Any, names: ParameterNames | None) -> Any:
        if isinstance(value, torch.optim.Optimizer):
            return optimizer_states.state_of(value, names if key in self.by_name else None)
        return value.state_dict()

    def restore(self, structure: Any, value_of: Callable[[str], Any], per_rank_value_of: Callable[[str], Any]) -> None:
        """Load a state.

        Args:
            structure: the structure of each shared state, by name.
            value_of: returns the value of a shared leaf by its name; raises KeyError if there is none.
            per_rank_value_of: returns this rank's state of an object by name, or of "generators"; None if there is
                none.

        Raises:
            CheckpointError: the checkpoint lacks a state or a leaf, or an object can't load its state.
        """
        for key, target in self.shared.items():
            if key not in structure:
                raise CheckpointError(f"the checkpoint holds {sorted(structure)}, and no {key}")
            state = state_tree.fill(structure[key], value_of)
            with _loading(key):
                if isinstance(target, torch.optim.Optimizer):
                    optimizer_states.load(target, state, self.parameter_names())
                else:
                    _load(target, state)
        as_made = []
        for key, target in self.per_rank.items():
            state = per_rank_value_of(key)
            if state is not None:
                with _loading(key):
                    target.load_state_dict(state)
            elif not isinstance(target, random_generators.KeptGenerator):
                as_made.append(key)
        if as_made:
            log.warning(
                "no state of %s was kept for this rank, and those of other ranks may differ: what the script has made "
                "stays. States that are equal on all ranks are those that per_rank= does not name",
                ", ".join(as_made),
            )
        state = per_rank_value_of("generators")
        if state is not None:
            random_generators.restore(state)

    def finish_steps(self, steps: int) -> None:
        """Tell the samplers that count steps of finished ones."""
        for target in self.wrapped.values():
            if isinstance(target, StepCounter):
                target.finish_steps(steps)

    @property
    def step_counter(self) -> StepCounter | None:
        """The sampler that counts steps, and so can skip the batches of some."""
        return next((target for target in self.wrapped.values() if isinstance(target, StepCounter)), None)

    def has_bucket_rebuild(self) -> bool:
        """Whether any model is a DistributedDataParallel that rebuilds its buckets after the first backward pass."""
        models = [getattr(model, "_orig_mod", model) for model in self.wrapped.values()]  # of torch.compile
        return any(isinstance(m, DistributedDataParallel) and not m.find_unused_parameters for m in models)

    def clear_gradients(self) -> None:
        """Set all gradients to None."""
        for target in self.wrapped.values():
            if isinstance(target, torch.nn.Module | torch.optim.Optimizer):
                target.zero_grad(set_to_none=True)


def _is_shared(value: Any) -> bool:
    kinds = (torch.nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler, StepCounter)
    return isinstance(value, kinds)


def _has_uncounted_sampler(loader: Any, kept: Collection[Any]) -> bool:
    """Whether a loader's sampler, or the one behind it, counts finished steps and is not kept."""
    samplers = [getattr(loader, name, None) for name in ("batch_sampler", "sampler")]
    samplers += [getattr(sampler, "sampler", None) for sampler in samplers]
    return any(isinstance(each, StepCounter) and all(each is not other for other in kept) for each in samplers)


@contextmanager
def _loading(key: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError, KeyError) as error:  # what torch raises if a state doesn't fit
        raise CheckpointError(
            f"{key} can't load its kept state: {_first_words(error)}. "
            "Make it as it was when the state was kept, before restore()"
        ) from error


def _first_words(error: Exception) -> str:
    """The first two lines of a message in one. PyTorch's has a line for each tensor that does not fit. The traceback
    shows them all. The job's reason is made of the last lines of a rank, which hold one long line and not a hundred.
    """
    first, *more = [line.strip() for line in str(error).splitlines()] or [""]
    rest = f" (and {len(more) - 1} more like it)" if len(more) > 1 else ""
    return " ".join([first, *more[:1]]).rstrip(".") + rest


def _load(target: Any, state: Any) -> None:
    if isinstance(target, torch.nn.Module):
        # load_state_dict needs the modules' format versions, an attribute that a plain dict does not have. A module
        # whose own state_dict() returns a plain dict does without.
        versions = getattr(target.state_dict(), "_metadata", None)
        if versions is not None:
            state = OrderedDict(state)
            state._metadata = versions
    target.load_state_dict(state)
