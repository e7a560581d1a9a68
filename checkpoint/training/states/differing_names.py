"""Names under which ranks hold different tensors: the experts of a layer, whose names are equal on all ranks.

A name means one tensor, or the shards of one DTensor, on all ranks that have it. Where that is not so, the user names
these tensors, and the group of ranks among which they differ. Each rank then keeps its own under
`parts.1_of_4.model.layers.0.experts.weight`, as number 1 of a group of 4. Ranks with the same number hold replicas.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist

from muster.checkpoint.format.errors import CheckpointError

PREFIX = "parts"


@dataclass(frozen=True)
class Part:
    """Which part of the states a rank holds: number `number` of `count`."""

    number: int
    count: int

    @property
    def label(self) -> str:
        """The part's name in a path."""
        return f"{self.number}_of_{self.count}"


class DifferingNames:
    """What the user has said of names under which ranks hold different tensors.

    Args:
        differs_in: for each pattern the group of ranks (a process group, a device mesh of one dimension, or None for
            all ranks). A pattern is the name of a state, or of some tensors in it, with * for any text:
            "model.layers.*.experts".
        keys: the names of the states.

    Raises:
        CheckpointError: a pattern begins with no state, or a group is none.
    """

    def __init__(self, differs_in: Mapping[str, Any], keys: Mapping[str, Any]) -> None:
        self._groups = dict(differs_in)
        self._parts: dict[str, Part] = {}
        for pattern, group in self._groups.items():
            if not any(fnmatchcase(key, pattern.split(".", 1)[0]) for key in keys):
                raise CheckpointError(
                    f"differs_in names {pattern!r}, and the states that all ranks share are {sorted(keys)}"
                )
            if group is not None and not (hasattr(group, "get_group") or isinstance(group, dist.ProcessGroup)):
                raise CheckpointError(
                    f"differs_in[{pattern!r}] is a {type(group).__name__}: give a process group, a device mesh of one "
                    "dimension, or None for all ranks"
                )

    def part_of(self, name: str, parameter: str | None = None) -> Part | None:
        """The part that this rank holds of a name; None: the name means the same on all ranks.

        `parameter`: the name of the model's leaf to which this leaf of an optimizer belongs.

        Raises:
            CheckpointError: this rank is not in the group.
        """
        for pattern, group in self._groups.items():
            for each in (name, parameter or name):
                if fnmatchcase(each, pattern) or fnmatchcase(each, f"{pattern}.*"):
                    if pattern not in self._parts:
                        self._parts[pattern] = _part_in(pattern, group)
                    return self._parts[pattern]
        return None

    def __bool__(self) -> bool:
        return bool(self._groups)


def _part_in(pattern: str, group: Any) -> Part:
    if not (dist.is_available() and dist.is_initialized()):
        return Part(0, 1)
    try:
        members = group.get_group() if hasattr(group, "get_group") else group
    except RuntimeError as error:
        raise CheckpointError(f"differs_in[{pattern!r}]: the device mesh must have one dimension: {error}") from error
    number = dist.get_rank(members)
    if number < 0:
        raise CheckpointError(f"differs_in[{pattern!r}]: this rank has such a state, and is not in the group")
    return Part(number, dist.get_world_size(members))


def plain_name(kept: str) -> str:
    """The name without its part."""
    return kept.split(".", 2)[2] if kept.startswith(f"{PREFIX}.") else kept


def kept_name(name: str, part: Part | None) -> str:
    """The reverse of `plain_name`."""
    return name if part is None else f"{PREFIX}.{part.label}.{name}"


def why_missing(name: str, part: Part | None, names: Collection[str]) -> str:
    """Why a checkpoint that holds `names` lacks this rank's part of a name, and what to do."""
    counts = {each.split(".", 2)[1].split("_of_")[-1] for each in names if each != name and plain_name(each) == name}
    if part is not None and name in names:
        return f"the checkpoint holds one {name} for all ranks, and differs_in says that {part.count} ranks differ"
    if part is None and counts:
        return f"in the checkpoint {name} differs between ranks: give the same differs_in as the run that wrote it"
    if part is not None and counts:
        return (
            f"in the checkpoint {name} differs between {', '.join(sorted(counts))} ranks, and here between "
            f"{part.count}: such tensors can't be divided anew (DTensors can)"
        )
    return f"the checkpoint lists {name!r} and does not hold it"
