"""Nested states and their leaves, traversed as torch.distributed.checkpoint traverses them: the names are the same.

Mappings, and lists that hold tensors or mappings, are inner nodes. All other values are leaves. A leaf's name is its
path joined by dots. The structure of a state is the same nested state with each leaf replaced by its name: plain dicts,
lists and strings, which any Python can read.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from muster.checkpoint.format.errors import CheckpointError

Path = tuple[str | int, ...]


def leaves(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf with its path, in the state's own order. Keys of mappings are text, list positions are numbers."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves(value, (*path, str(key)))
    elif isinstance(state, list) and not _is_leaf_list(state):
        for position, value in enumerate(state):
            yield from leaves(value, (*path, position))
    else:
        yield path, state


def name(path: Path) -> str:
    """The name of a leaf."""
    return ".".join(map(str, path))


def structure(state: Any, path: Path = ()) -> Any:
    """The state with each leaf replaced by its name. Keys keep their type: an optimizer's keys are integers."""
    if isinstance(state, Mapping):
        return {key: structure(value, (*path, str(key))) for key, value in state.items()}
    if isinstance(state, list) and not _is_leaf_list(state):
        return [structure(value, (*path, position)) for position, value in enumerate(state)]
    return name(path)


def names(structure: Any) -> Iterator[str]:
    """The names of all leaves, given the structure of a state. Each list in it is an inner node."""
    if isinstance(structure, dict | list):
        for inner in structure.values() if isinstance(structure, dict) else structure:
            yield from names(inner)
    else:
        yield structure


def fill(structure: Any, value_of: Callable[[str], Any]) -> Any:
    """The state whose structure is given: the reverse of `structure`.

    Raises:
        CheckpointError: a leaf has no value (`value_of` raises KeyError).
    """
    if isinstance(structure, dict):
        return {key: fill(value, value_of) for key, value in structure.items()}
    if isinstance(structure, list):
        return [fill(value, value_of) for value in structure]
    try:
        return value_of(structure)
    except KeyError:
        raise CheckpointError(f"the checkpoint lists {structure!r} and does not hold it") from None


def _is_leaf_list(values: list[Any]) -> bool:
    """Whether a list is one leaf: it holds neither tensors nor mappings, at any depth."""
    for entry in values:
        if isinstance(entry, Mapping) or (isinstance(entry, list) and not _is_leaf_list(entry)):
            return False
        if isinstance(entry, torch.Tensor):
            return False
    return True
