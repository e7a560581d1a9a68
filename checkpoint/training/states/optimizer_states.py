"""The state of an optimizer as a checkpoint holds it: by the numbers of the parameters, or by their names.

torch numbers the parameters of each optimizer from 0. Where the ranks optimize different parameters, as the stages of a
pipeline do, the same number means another parameter on another rank. There the state has the form that
`torch.distributed.checkpoint.state_dict` calls flattened: `state.NAME.exp_avg` and `param_groups.NAME.lr`.

Each rank of a ZeroRedundancyOptimizer (ZeRO-1) gives the states of the parameters that it updates, under the numbers
that they have in the whole optimizer. All ranks together hold what `consolidate_state_dict` would collect, without its
collective call.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training.states import state_tree

ParameterNames = Mapping[int, str]
"""The name of each parameter of the kept models, by its id()."""


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer, in the order of their numbers."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def names_by_group(optimizer: torch.optim.Optimizer, names: ParameterNames) -> list[list[str | None]]:
    """The names of the parameters of each group; None for a parameter of no kept model."""
    return [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]


def parameter_names(models: Mapping[str, torch.nn.Module]) -> dict[int, str]:
    """The names of the models' parameters. With several models the name of its model precedes each."""
    found: dict[int, str] = {}
    for key, model in models.items():
        for name, parameter in model.named_parameters():
            found.setdefault(id(parameter), name if len(models) == 1 else f"{key}.{name}")
    return found


def state_of(optimizer: torch.optim.Optimizer, names: ParameterNames | None) -> dict[str, Any]:
    """The state that this rank holds. `names`: of the parameters, for the flattened form; None: by numbers.

    Raises:
        CheckpointError: a parameter has no name.
    """
    if names is None and not is_sharded(optimizer):
        whole: dict[str, Any] = optimizer.state_dict()
        return whole
    numbers = {id(parameter): number for number, parameter in enumerate(parameters_of(optimizer))}
    own = owner(optimizer)
    if names is None:
        state: dict[Any, Any] = {numbers[id(parameter)]: own.state[parameter] for parameter in _with_state(optimizer)}
        groups = [{**group, "params": [numbers[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
        return {"state": dict(sorted(state.items())), "param_groups": groups}
    for number, parameter in enumerate(parameters_of(optimizer)):
        if id(parameter) not in names:
            raise CheckpointError(
                f"parameter {number} of an optimizer, of shape {tuple(parameter.shape)}, is of no model that "
                "Checkpoint keeps, and ranks optimize different parameters, so that they are kept by their names: give "
                "Checkpoint each model whose parameters are optimized"
            )
    packed = {} if is_sharded(optimizer) else optimizer.state_dict()["state"]
    state = {
        names[id(parameter)]: packed.get(numbers[id(parameter)], own.state[parameter])
        for parameter in _with_state(optimizer)
    }
    of_groups = {
        names[id(parameter)]: {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {"state": state, "param_groups": of_groups}


def load(optimizer: torch.optim.Optimizer, state: dict[str, Any], names: ParameterNames) -> None:
    """Load a state of either form. Tensors keep their dtypes, and become the optimizer's own.

    Raises:
        CheckpointError: the state lacks a parameter of this optimizer.
    """
    if isinstance(state["param_groups"], dict):
        state = _numbered(optimizer, state, names)
    if not is_sharded(optimizer):
        optimizer.load_state_dict(state)
        _restore_dtypes(optimizer, state)
        return
    # Its load_state_dict would keep a second copy of all states.
    optimizer.load_state_dict({"state": {}, "param_groups": state["param_groups"]})
    numbers = {id(parameter): number for number, parameter in enumerate(parameters_of(optimizer))}
    for parameter in updated(optimizer):
        if numbers[id(parameter)] in state["state"]:
            of_parameter = state["state"][numbers[id(parameter)]]
            owner(optimizer).state[parameter] = {k: _on_device(v, parameter) for k, v in of_parameter.items()}


def parameters_by_leaf(
    optimizer: torch.optim.Optimizer, structure: Any, names: ParameterNames
) -> dict[str, torch.Tensor]:
    """The parameter to which each leaf of an optimizer's state belongs, by the leaf's name."""
    if not isinstance(structure, Mapping) or not isinstance(structure.get("state"), Mapping):
        return {}
    parameters = parameters_of(optimizer)
    labels: dict[Any, torch.Tensor] = dict(enumerate(parameters))
    labels |= {names[id(parameter)]: parameter for parameter in parameters if id(parameter) in names}
    groups = structure.get("param_groups")
    found: dict[str, torch.Tensor] = {}
    for labelled in (structure["state"], groups if isinstance(groups, Mapping) else {}):
        for label, inner in labelled.items():
            if label in labels:
                found |= dict.fromkeys(state_tree.names(inner), labels[label])
    return found


def is_sharded(optimizer: Any) -> bool:
    """Whether this is a ZeroRedundancyOptimizer. Its module takes long to import: whoever has made one has done so."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def owner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer of torch that holds this rank's states."""
    inner: torch.optim.Optimizer = optimizer.optim if is_sharded(optimizer) else optimizer
    return inner


def updated(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters that this rank updates."""
    return parameters_of(owner(optimizer))


def _with_state(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters that have a state here."""
    return (parameter for parameter in updated(optimizer) if parameter in owner(optimizer).state)


def _on_device(value: Any, parameter: torch.Tensor) -> Any:
    """A state where the optimizer wants it: counters of steps stay in host memory."""
    return value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value


def _numbered(optimizer: torch.optim.Optimizer, state: dict[str, Any], names: ParameterNames) -> dict[str, Any]:
    """The state by numbers that belongs to a flattened one."""
    numbered: dict[int, Any] = {}
    groups = []
    for number, parameter in enumerate(parameters_of(optimizer)):
        name = names.get(id(parameter))
        if name is None or name not in state["param_groups"]:
            raise CheckpointError(
                f"the checkpoint holds the optimizer's state by the names of parameters, and no {name or 'name'} for "
                f"parameter {number}: keep the same models and optimizers as the run that wrote it"
            )
        if name in state["state"]:
            numbered[number] = state["state"][name]
    number = 0
    for group in optimizer.param_groups:
        kept = state["param_groups"][names[id(group["params"][0])]] if group["params"] else {}
        own = {key: value for key, value in group.items() if key != "params"}
        groups.append({**own, **kept, "params": list(range(number, number + len(group["params"])))})
        number += len(group["params"])
    return {"state": numbered, "param_groups": groups}


def _restore_dtypes(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Undo the optimizer's cast of its state to the parameters' dtype: the loaded state keeps the dtypes it had."""
    packed = optimizer.state_dict()
    numbers = [n for group in packed["param_groups"] for n in group["params"]]
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=True):
        for key, saved in state["state"].get(number, {}).items():
            loaded = optimizer.state[parameter]
            if key in loaded:
                loaded[key] = _with_dtypes_of(saved, loaded[key])


def _with_dtypes_of(saved: Any, loaded: Any) -> Any:
    """The loaded value; in place of tensors whose dtype has changed, at any depth, the saved ones."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(device=loaded.device)
    if isinstance(saved, dict) and isinstance(loaded, dict) and saved.keys() == loaded.keys():
        return {key: _with_dtypes_of(saved[key], value) for key, value in loaded.items()}
    if isinstance(saved, list | tuple) and type(saved) is type(loaded) and len(saved) == len(loaded):
        return type(saved)(_with_dtypes_of(*pair) for pair in zip(saved, loaded, strict=True))
    return loaded
