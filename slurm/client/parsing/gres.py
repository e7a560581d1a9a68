"""Reads the generic resources of a node, as slurm.conf and Slurm's commands write them, and what --gpus asks for."""

from __future__ import annotations

import re
from collections.abc import Callable

_MIG = re.compile(r"\dg\.\d+gb", re.IGNORECASE)
_BETWEEN_PARTS = re.compile(r",(?![^(]*\))")
_GRES_PART = re.compile(r"gpu(?::(?!\d+(?:$|\())(?P<type>[^:()]+))?(?::no_consume)?(?::(?P<count>\d+))?(?:\(.*\))?")
_COUNT = re.compile(r"(?<![^,:])\d+(?![^,])")
"""Not the 100 of "a100"."""


def count_gpus(gres: str, *, parts: bool = False) -> int | None:
    """The GPUs in "gpu:h100:4(S:0-1),gpu:a100:4,shard:64"; None: unreadable, or parts of GPUs ("gpu:1g.10gb:7").

    `parts`: a part counts as a GPU.
    """
    total = 0
    for part in filter(_is_gpu, _BETWEEN_PARTS.split(gres)):
        found = _GRES_PART.fullmatch(part.strip())
        if found is None or (_MIG.search(part) and not parts):
            return None
        total += int(found["count"] or 1)
    return total


def without_gpus(gres: str) -> str:
    """The other resources of "gpu:h100:4,nvme:1"."""
    return ",".join(part for part in _BETWEEN_PARTS.split(gres) if not _is_gpu(part))


def counts(asked: str) -> list[int]:
    """The numbers in the value of --gpus: of "8", and of "a100:8,h100:8"."""
    return [int(count) for count in _COUNT.findall(asked)]


def with_counts(asked: str, other: Callable[[int], int]) -> str:
    """The value of --gpus with `other` numbers."""
    return _COUNT.sub(lambda found: str(other(int(found[0]))), asked)


def of_each(asked: str, nodes: int) -> str:
    """What --gpus asks for on each of so many nodes; empty: nothing, or not the same on all."""
    found = counts(asked)
    return with_counts(asked, lambda count: count // nodes) if found and not any(n % nodes for n in found) else ""


def _is_gpu(part: str) -> bool:
    return part.partition(":")[0].strip().lower() == "gpu"
