"""The axes of parallelism: their degrees, and the order in which ranks count through them.

A rank's coordinates follow from its number. The first axis of the order varies fastest: with order tp-pp and degrees 2
and 3, ranks 0 and 1 are one tensor group, and ranks 0, 2 and 4 are one pipeline.

Experts have a layout of their own. An expert group is cut out of the data axis and the context axis together, and adds
no rank. With 16 ranks, tensor 2, context 2, data 4 and expert 4, dense layers see 2 * 2 * 4 ranks. Expert layers see
2 (tensor) * 4 (expert) * 2 (expert data) ranks. This is Megatron-LM's rule (megatron/core/parallel_state.py,
`RankGenerator`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache


class Axis(StrEnum):
    """An axis of parallelism, under the name that Megatron-LM's orders use."""

    TENSOR = "tp"
    CONTEXT = "cp"
    EXPERT = "ep"
    DATA = "dp"
    PIPELINE = "pp"

    @cached_property
    def word(self) -> str:
        """The word that job.toml uses: "tensor"."""
        return self.name.lower()


MEGATRON_ORDER = (Axis.TENSOR, Axis.CONTEXT, Axis.EXPERT, Axis.DATA, Axis.PIPELINE)
"""The default: tensor groups are consecutive ranks, and the stages of a pipeline are as far apart as possible."""


class AxesError(ValueError):
    """Degrees or an order that no job can have. The message says what would be right."""


@dataclass(frozen=True, slots=True)
class Axes:
    """The degree of each axis, and their order.

    Raises:
        AxesError: a degree is less than 1, an axis is not in the order exactly once, `expert` does not divide
            `data * context`, or the pipelines of dense layers and of expert layers would differ.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    pipeline: int = 1
    order: tuple[Axis, ...] = MEGATRON_ORDER
    """All axes, the one that varies fastest first."""

    def __post_init__(self) -> None:
        """Refuses axes that don't fit together."""
        for axis in Axis:
            if self.degree(axis) < 1:
                raise AxesError(f"{axis.word} = {self.degree(axis)} must be 1 or more")
        if sorted(self.order) != sorted(Axis):
            raise AxesError(f"the order {write_order(self.order)} must name each of tp, cp, ep, dp and pp once")
        if (self.data * self.context) % self.expert:
            raise AxesError(
                f"expert = {self.expert} must divide data * context = {self.data} * {self.context} = "
                f"{self.data * self.context}: expert groups are cut out of these axes. Choose {self._expert_degrees()}"
            )
        if self.pipeline > 1 and self.stride(Axis.PIPELINE) != self.stride(Axis.PIPELINE, expert_layers=True):
            raise AxesError(
                f"the order {write_order(self.order)} gives expert layers other pipelines than dense layers: "
                "put pp last"
            )

    def _expert_degrees(self) -> str:
        """The degrees next to `expert` that are possible: "2 or 4"."""
        ranks = self.data * self.context
        below = next(degree for degree in range(min(self.expert, ranks), 0, -1) if ranks % degree == 0)
        above = next((degree for degree in range(self.expert, ranks + 1) if ranks % degree == 0), below)
        return f"{below} or {above}" if above > below else str(below)

    @property
    def world_size(self) -> int:
        """The number of ranks. The expert degree is no factor of it."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def expert_data(self) -> int:
        """The number of ranks that hold the same experts."""
        return self.data * self.context // self.expert

    def degree(self, axis: Axis) -> int:
        """The degree of `axis`, in the layout of the layers that have this axis."""
        return int(getattr(self, axis.word))

    def layout(self, *, expert_layers: bool = False) -> tuple[tuple[Axis, int], ...]:
        """The axes of dense layers, or of expert layers, with their degrees; the fastest first. The product is the
        world size.
        """
        return _layout(self, expert_layers)

    def stride(self, axis: Axis, *, expert_layers: bool = False) -> int:
        """The distance in rank numbers between neighbours on `axis`."""
        layout = self.layout(expert_layers=expert_layers)
        at = [name for name, _ in layout].index(axis)
        return math.prod(degree for _, degree in layout[:at])


@lru_cache(1024)
def _layout(axes: Axes, expert_layers: bool) -> tuple[tuple[Axis, int], ...]:
    """See Axes.layout. A view of a large job asks for it once for each rank."""
    absent = Axis.CONTEXT if expert_layers else Axis.EXPERT
    degrees = {axis: axes.degree(axis) for axis in axes.order if axis is not absent}
    if expert_layers:
        degrees[Axis.DATA] = axes.expert_data
    return tuple(degrees.items())


def parse_order(text: str) -> tuple[Axis, ...]:
    """The order that `text` names, the axis that varies fastest first: "tp-cp-ep-dp-pp".

    Axes that `text` does not name come last, as in Megatron-LM.

    Raises:
        AxesError: a name is unknown, or occurs twice.
    """
    words = text.split("-")
    if len(words) > len(Axis) or len(set(words)) != len(words) or not set(words) <= set(Axis):
        raise AxesError(
            f'{text[:60]!r} is no order of axes: write tp, cp, ep, dp and pp, each once, with "-" between them; '
            f'"{write_order(MEGATRON_ORDER)}" is the default'
        )
    named = tuple(map(Axis, words))
    return (*named, *(axis for axis in MEGATRON_ORDER if axis not in named))


def write_order(order: tuple[Axis, ...]) -> str:
    """The inverse of `parse_order`."""
    return "-".join(order)
