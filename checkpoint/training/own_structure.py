"""The part of a durable checkpoint that a rank needs. Ranks may hold different things now than when it was written.

A stage of a pipeline needs its own layers, and a rank of a ZeroRedundancyOptimizer the states of the parameters that it
updates. Parameters have the same names in every division of a model, so the states of optimizers are found by them.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training.agreements.process_group import all_gathered, rank_and_world_size
from muster.checkpoint.training.states import optimizer_states, state_tree
from muster.checkpoint.training.states.differing_names import PREFIX, Part, kept_name
from muster.checkpoint.training.states.training_state import TrainingState

_NAMED = 3
"""The most names that an error lists."""


def own_structure(states: TrainingState, structure: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the checkpoint's structure that this rank loads. A collective call.

    Raises:
        CheckpointError: the checkpoint holds a parameter that no rank has.
    """
    _, world_size = rank_and_world_size()
    own, unclaimed = dict(structure), set[str]()
    if world_size > 1:  # a model that is here as a whole refuses foreign names by itself
        for key, model in states.models().items():
            present = model.state_dict().keys()
            unclaimed |= {f"{key}.{name}" for name in structure.get(key, {}) if name not in present}
            own[key] = {name: leaf for name, leaf in structure.get(key, {}).items() if name in present}
        if nobodys := set.intersection(*all_gathered(unclaimed)):
            some = ", ".join(sorted(nobodys)[:_NAMED])
            raise CheckpointError(f"the checkpoint holds {len(nobodys)} values that no rank has: {some}")
    names = states.parameter_names()
    recorded = structure.get("muster", {}).get("parameters", {})
    for key, optimizer in states.optimizers().items():
        if key in structure:
            own[key] = _of_optimizer(optimizer, structure[key], recorded.get(key), names)
    return own


def without_missing_states(
    states: TrainingState,
    structure: dict[str, Any],
    part_of: Callable[[str], Part | None],
    names: Collection[str],
) -> dict[str, Any]:
    """The structure without the optimizer states that this rank's part of differing names did not have: an expert has
    none before its first token. `names`: all that the checkpoint holds."""
    parts_there = {name.split(".", 2)[1] for name in names if name.startswith(f"{PREFIX}.")}

    def is_missing(name: str) -> bool:
        part = part_of(name)
        return part is not None and part.label in parts_there and kept_name(name, part) not in names

    own = dict(structure)
    for key in states.optimizers():
        if isinstance(of_optimizer := own.get(key), dict) and isinstance(of_optimizer.get("state"), dict):
            there = {
                label: inner
                for label, inner in of_optimizer["state"].items()
                if not any(map(is_missing, state_tree.names(inner)))
            }
            own[key] = {**of_optimizer, "state": there}
    return own


def _of_optimizer(
    optimizer: torch.optim.Optimizer, structure: Any, recorded: list[list[str]] | None, names: Mapping[int, str]
) -> Any:
    """The structure of the states of the parameters that this rank updates.

    `recorded`: the names of the parameters of each group, if the checkpoint tells them.
    """
    if (
        not isinstance(structure, dict)
        or not isinstance(structure.get("state"), dict)
        or "param_groups" not in structure
    ):
        return structure
    parameters = optimizer_states.parameters_of(optimizer)
    if recorded and recorded != optimizer_states.names_by_group(optimizer, names):
        structure = _by_name(structure, recorded)
    updated = {id(parameter) for parameter in optimizer_states.updated(optimizer)}
    if isinstance(structure["param_groups"], dict):
        labels: set[Any] = {names.get(number) for number in updated}
        all_labels = {names.get(id(parameter)) for parameter in parameters}
        groups = {label: group for label, group in structure["param_groups"].items() if label in all_labels}
    else:
        labels = {number for number, parameter in enumerate(parameters) if id(parameter) in updated}
        labels |= {n for n in structure["state"] if not isinstance(n, int) or n >= len(parameters)}
        groups = structure["param_groups"]
    state = {label: found for label, found in structure["state"].items() if label in labels}
    return {**structure, "state": state, "param_groups": groups}


def _by_name(structure: dict[str, Any], recorded: list[list[str]]) -> dict[str, Any]:
    """The structure of a state by numbers, as one by the names of parameters."""
    by_number = [name for group in recorded for name in group]
    groups: dict[str, Any] = {}
    for names, group in zip(recorded, structure["param_groups"], strict=True):
        of_group = {key: leaf for key, leaf in group.items() if key not in ("params", "param_names")}
        groups |= dict.fromkeys(names, of_group)
    state = {by_number[number]: found for number, found in structure["state"].items() if isinstance(number, int)}
    return {"state": state, "param_groups": groups}
