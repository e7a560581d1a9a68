"""The plain tensors that a tensor of a subclass consists of: the codes and the scales of a quantized tensor, say.

Subclasses with torch's own protocol, `__tensor_flatten__` and `__tensor_unflatten__`, are taken apart and put together
again, at any depth. Nothing else of them is kept, so what is no inner tensor must be in the context that the protocol
gives. Other subclasses with memory of their own are kept as the plain tensors that they extend.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from muster.checkpoint.format.errors import CheckpointError


@dataclass(frozen=True)
class Recipe:
    """How a tensor of a subclass is put together. `inner`: the recipe of each inner tensor by its attribute's name,
    None for a plain one. `context`: what the subclass needs besides."""

    kind: type
    inner: tuple[tuple[str, "Recipe | None"], ...]
    context: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: the local shard of a DTensor, any other tensor itself."""
    return value.to_local() if hasattr(value, "placements") else value


def taken_apart(value: torch.Tensor, name: str = "a tensor") -> tuple[list[torch.Tensor], Recipe | None]:
    """The plain tensors of this rank's part of a tensor, and how they are put together; None for a plain tensor.

    Raises:
        CheckpointError: the bytes of this kind of tensor can't be kept.
    """
    if any(placement.is_partial() for placement in getattr(value, "placements", ())):
        raise CheckpointError(
            f"{name} is a DTensor of partial sums ({value.placements}), whose values no rank has: redistribute it to "
            "Replicate() or Shard() before the step, or leave it out"
        )
    parts: list[torch.Tensor] = []
    recipe = _take_apart(local_tensor(value), parts, name)
    return parts, recipe


def _take_apart(value: torch.Tensor, parts: list[torch.Tensor], name: str) -> Recipe | None:
    if not hasattr(value, "__tensor_flatten__"):
        _check(value, name)
        parts.append(value)
        return None
    if hasattr(value, "placements"):
        raise CheckpointError(
            f"{name} is of a tensor subclass around DTensors: only DTensors around subclasses are kept"
        )
    attributes, context = value.__tensor_flatten__()
    inner = tuple((each, _take_apart(getattr(value, each), parts, f"{name}.{each}")) for each in attributes)
    return Recipe(type(value), inner, context, tuple(value.shape), tuple(value.stride()))


def _check(value: torch.Tensor, name: str) -> None:
    if value.layout != torch.strided or value.is_quantized:
        raise CheckpointError(f"{name} is no plain strided tensor: only those can be kept")
    if value.device.type == "meta":
        raise CheckpointError(f"{name} is on the meta device, without any bytes: materialise it before the first step")
    if value.numel() and not value.data_ptr():
        kind = type(value).__name__
        raise CheckpointError(
            f"{name} is a {kind} without bytes of its own: to be kept, {kind} needs torch's protocol for wrapper "
            "subclasses, __tensor_flatten__ and __tensor_unflatten__"
        )


def put_together(recipe: Recipe | None, parts: Iterator[torch.Tensor]) -> torch.Tensor:
    """The reverse of `taken_apart`: a tensor of the next parts, without a copy."""
    if recipe is None:
        return next(parts)
    inner = {name: put_together(of_inner, parts) for name, of_inner in recipe.inner}
    made: torch.Tensor = recipe.kind.__tensor_unflatten__(  # type: ignore[attr-defined]  # torch's protocol
        inner, recipe.context, torch.Size(recipe.shape), recipe.stride
    )
    return made


def stand_in(value: torch.Tensor) -> torch.Tensor:
    """What torch.distributed.checkpoint may ask of a tensor: its shape, its dtype, and how it lies over the ranks.

    Few subclasses have all operations that this takes, so a plain tensor without memory stands in for them.
    """
    local = local_tensor(value.detach())
    if not hasattr(local, "__tensor_flatten__"):
        return value.detach()
    plain = torch.empty((), dtype=value.dtype).expand(local.shape)
    if not hasattr(value, "placements"):
        return plain
    from torch.distributed.tensor import DTensor

    shape, stride = value.shape, value.stride()
    return DTensor.from_local(plain, value.device_mesh, value.placements, run_check=False, shape=shape, stride=stride)
