"""What the tables of job.toml have in common. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]


class Table(BaseModel):
    """One table of job.toml: unknown keys and numbers that are not finite are refused."""

    # Tables inside other tables are checked with these: they need no validator of their own.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)
