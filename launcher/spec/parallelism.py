"""[parallelism] of job.toml: the degrees, and the axes that follow from them and from the number of ranks. Pure."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema, model_validator

from muster.fabric.groups.axes import MEGATRON_ORDER, Axes, AxesError, Axis, parse_order, write_order
from muster.launcher.spec.table import Count, Table

Sharding = Literal["none", "optimizer", "gradients", "parameters"]


def _order(value: Any) -> tuple[Axis, ...]:
    if not isinstance(value, str):
        raise ValueError(f'must be a string in quotes, for example "{write_order(MEGATRON_ORDER)}"')
    return parse_order(value)


Order = Annotated[
    tuple[Axis, ...],
    PlainValidator(_order),
    PlainSerializer(write_order, return_type=str),
    WithJsonSchema({"type": "string", "pattern": "^(tp|cp|ep|dp|pp)(-(tp|cp|ep|dp|pp))*$"}),
]


class Parallelism(Table):
    """[parallelism]: how the ranks divide the model. tensor * context * pipeline * data is the number of ranks."""

    tensor: Count = 1
    """Ranks that share the matrices of each layer."""
    pipeline: Count = 1
    """Stages: groups of consecutive layers."""
    data: Count | None = None
    """Copies of the model, each of which trains on other samples. Default: the remaining factor."""
    context: Count = 1
    """Ranks that share each sequence."""
    expert: Count = 1
    """Ranks that share the experts of each layer. They are cut out of data * context and add no rank."""
    sequence: Annotated[bool, Field(strict=True)] = False
    """Split the activations between the matrices over the tensor group too. It adds no rank."""
    order: Order = Field(default=write_order(MEGATRON_ORDER), validate_default=True)
    """In which order ranks count through the axes, the one that varies fastest first."""
    micro_batches: Count | None = None
    """Micro-batches of each step, in each copy of the model."""
    virtual_stages: Count = 1
    """Stages that each rank of a pipeline holds, for the interleaved schedule."""
    sharding: Sharding = "none"
    """What the copies of the model divide among each other: as ZeRO 1, 2 and 3."""

    @model_validator(mode="after")
    def _check_together(self) -> Parallelism:
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence = true splits activations over the tensor group: it needs tensor = 2 or more")
        if self.virtual_stages > 1 and self.pipeline == 1:
            raise ValueError(f"virtual_stages = {self.virtual_stages} needs pipeline = 2 or more")
        return self

    @property
    def has_groups(self) -> bool:
        """Whether ranks divide a copy of the model."""
        return self.tensor * self.context * self.pipeline * self.expert > 1

    def keeps_copies_on_nodes(self, local_ranks: int) -> bool:
        """Whether the ranks of each node divide whole copies of the model among each other, so that a job with fewer
        nodes only has fewer copies, or (sharding) divides them among fewer ranks."""
        others = self.context * self.pipeline * self.expert
        return others == 1 and local_ranks % self.tensor == 0 and (self.tensor == 1 or self.order[0] is Axis.TENSOR)

    def axes(self, nodes: int, local_ranks: int) -> Axes:
        """The axes of a job with `local_ranks` ranks on each of `nodes` nodes.

        Raises:
            ValueError: the degrees don't fit the number of ranks, or each other. The message says what would fit.
        """
        world = nodes * local_ranks
        size = f"nodes * ranks_per_node = {nodes} * {local_ranks} = {world}"
        model = self.tensor * self.context * self.pipeline
        written = "parallelism.tensor * context * pipeline"
        factors = f"{self.tensor} * {self.context} * {self.pipeline}"
        if self.data is None and world % model:
            multiple = model // math.gcd(model, local_ranks)
            raise ValueError(
                f"{written} = {factors} = {model} must divide {size}: choose nodes as a multiple of {multiple}"
            )
        data = self.data or world // model
        if model * data != world:
            fits = f": remove data, or choose data = {world // model}"
            if world % model:
                multiple = model * data // math.gcd(model * data, local_ranks)
                fits = f": choose nodes as a multiple of {multiple}" + (" and remove data" if data > 1 else "")
            raise ValueError(f"{written} * data = {factors} * {data} = {model * data} must equal {size}{fits}")
        try:
            return Axes(self.tensor, self.context, self.expert, data, self.pipeline, self.order)
        except AxesError as error:
            raise ValueError(f"parallelism: {error}") from None
