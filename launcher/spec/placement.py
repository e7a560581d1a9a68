"""[placement] of job.toml: how tightly each kind of group is packed, and what is spread over failure domains. Pure.

The defaults are what an expert would choose. The heaviest traffic gets the fastest links: tensor groups first, then
expert and context groups, then neighbours in the pipeline. Groups of data parallelism are the largest ones, and follow
the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema

from muster.daemon.transport import job_limits
from muster.fabric.groups.rank_groups import GroupKind
from muster.fabric.model.level import Level
from muster.fabric.model.node import FailureDomain
from muster.launcher.spec.table import Table

Place = TypeVar("Place")

PACKED = {level.word: level for level in (Level.NODE, Level.NVLINK, Level.LEAF, Level.POD, Level.ANY)}
SPREAD = {domain.value: domain for domain in (FailureDomain.LEAF, FailureDomain.RACK, FailureDomain.POWER)}


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each group of one kind shall fit in."""

    level: Level
    required: bool = False
    """Whether the job must not start otherwise. If not, a placement outside only costs more."""

    def __str__(self) -> str:
        """As job.toml writes it."""
        return _write(self.level.word, self.required)


@dataclass(frozen=True, slots=True)
class Spreading:
    """What two nodes shall not share."""

    domain: FailureDomain
    required: bool = False
    """Whether the job must not start otherwise."""

    def __str__(self) -> str:
        """As job.toml writes it."""
        return _write(self.domain.value, self.required)


def _write(word: str, required: bool) -> str:
    return f"{'require' if required else 'prefer'} {word}"


def _read(value: Any, places: dict[str, Place]) -> tuple[Place, bool]:
    """The place, and whether it is required, from "leaf", "prefer leaf" or "require leaf"."""
    *strength, place = value.split() if isinstance(value, str) and value.strip() else [""]
    if strength not in ([], ["prefer"], ["require"]) or place not in places:
        words = list(places)
        raise ValueError(
            f'must be {", ".join(words[:-1])} or {words[-1]}, after "prefer" (the default) or "require"; for example '
            f'"require {words[0]}"'
        )
    return places[place], strength == ["require"]


def _read_packing(value: Any) -> Packing:
    return Packing(*_read(value, PACKED))


def _read_spreading(value: Any) -> Spreading:
    return Spreading(*_read(value, SPREAD))


def _schema(places: dict[str, Place]) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": f"^((prefer|require) )?({'|'.join(places)})$"})


_TEXT = PlainSerializer(str, return_type=str)
PackingText = Annotated[Packing, PlainValidator(_read_packing), _TEXT, _schema(PACKED)]
SpreadingText = Annotated[Spreading, PlainValidator(_read_spreading), _TEXT, _schema(SPREAD)]

Retries = Annotated[int, Field(strict=True, ge=0, le=job_limits.MAX_PLACEMENT_RETRIES)]
IfNotAvailable = Literal["wait", "relax", "shrink"]


class Placement(Table):
    """[placement]: where each kind of group shall fit in, and what shall not fail together."""

    tensor: PackingText = Field(default="nvlink", validate_default=True)
    """Each tensor group."""
    context: PackingText = Field(default="leaf", validate_default=True)
    """Each context group."""
    expert: PackingText = Field(default="leaf", validate_default=True)
    """Each expert group."""
    pipeline: PackingText = Field(default="pod", validate_default=True)
    """Each two stages that are neighbours in a pipeline."""
    data: PackingText = Field(default="any", validate_default=True)
    """Each group that averages gradients."""
    spread_replicas: tuple[SpreadingText, ...] = Field(default=("power", "rack", "leaf"), validate_default=True)
    """What a node and its buddy, which holds the second copy of its shards, shall not share."""
    spread_spares: tuple[SpreadingText, ...] = Field(default=("power", "rack"), validate_default=True)
    """What two spares shall not share."""

    if_not_available: IfNotAvailable | None = None
    """What to do if such nodes are not free at once, or Slurm hands out others. Default: wait for what is required,
    relax what is preferred.
    """
    retries: Retries = 3
    """How often in a row other nodes are given back to wait again. Then the job starts, unless a group is required."""

    def packing(self, kind: GroupKind) -> Packing:
        """Where groups of `kind` shall fit in. Groups that average gradients of experts count as data groups."""
        packing: Packing = getattr(self, "data" if kind is GroupKind.EXPERT_DATA else kind.value)
        return packing
