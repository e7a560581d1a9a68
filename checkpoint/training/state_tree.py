"""Nested states and their leaves, walked as torch.distributed.checkpoint walks them, so that the names are the same.

Mappings are entered, and lists that hold tensors or mappings; all else is a leaf. A leaf's name is its path joined by
dots. The structure is the same nest with each leaf replaced by its name: plain dicts, lists and strings, which any
Python reads.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from muster.checkpoint.format.errors import CheckpointError

Path = tuple[str | int, ...]


def leaves(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every leaf with its path (keys of mappings as text, places in lists as numbers), in the state's own order."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from leaves(value, (*path, str(key)))
    elif isinstance(state, list) and not _terminal(state):
        for place, value in enumerate(state):
            yield from leaves(value, (*path, place))
    else:
        yield path, state


def name(path: Path) -> str:
    """A leaf's name."""
    return ".".join(map(str, path))


def structure(state: Any, path: Path = ()) -> Any:
    """The nest with each leaf replaced by its name; keys stay what they are (an optimizer's are integers)."""
    if isinstance(state, Mapping):
        return {key: structure(value, (*path, str(key))) for key, value in state.items()}
    if isinstance(state, list) and not _terminal(state):
        return [structure(value, (*path, place)) for place, value in enumerate(state)]
    return name(path)


def fill(shape: Any, value_of: Callable[[str], Any]) -> Any:
    """The reverse of `structure`.

    Raises:
        CheckpointError: a leaf has no value (`value_of` raises KeyError).
    """
    if isinstance(shape, dict):
        return {key: fill(value, value_of) for key, value in shape.items()}
    if isinstance(shape, list):
        return [fill(value, value_of) for value in shape]
    try:
        return value_of(shape)
    except KeyError:
        raise CheckpointError(f"the checkpoint lists {shape!r} and does not hold it") from None


def _terminal(values: list[Any]) -> bool:
    for entry in values:
        if isinstance(entry, Mapping) or (isinstance(entry, list) and not _terminal(entry)):
            return False
        if isinstance(entry, torch.Tensor):
            return False
    return True
