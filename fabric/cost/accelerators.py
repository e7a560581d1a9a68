"""The table of accelerators: the keys of accelerators.toml, and of a site's own entries in the same form. Pure.

A look-up takes upper or lower case and an unambiguous beginning of a name: "h100-sxm", "MI300X", "GB200".
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Number = Annotated[int, Field(strict=True, ge=1)]


class Accelerator(BaseModel):
    """What one accelerator can do. accelerators.toml explains the units."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)  # the table's validator checks it

    flops: dict[str, Positive]
    memory: Positive
    memory_bandwidth: Positive
    link: Positive
    domain: Number
    per_node: Number
    nic: Positive
    efficiency: Annotated[float, Field(gt=0, le=1)] | None = None
    source: Annotated[str, Field(min_length=1)]

    def peak(self, precision: str) -> float:
        """FLOP/s of dense matrix products in this precision.

        Raises:
            AcceleratorError: the table has no figure.
        """
        try:
            return self.flops[precision]
        except KeyError:
            known = ", ".join(self.flops)
            raise AcceleratorError(f"no peak for precision '{precision}' is known; known are {known}") from None


class AcceleratorError(ValueError):
    """An entry or a name is wrong. The message says what would be right."""


_TABLE = TypeAdapter(dict[str, Accelerator])


def read(table: Mapping[str, Any], where: str) -> dict[str, Accelerator]:
    """The entries of a file with the keys `table`. `where` names the file in error messages.

    Raises:
        AcceleratorError: an entry is not valid.
    """
    try:
        return _TABLE.validate_python(table)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise AcceleratorError(f"{where}: {key}: {first['msg']}; accelerators.toml explains each key") from None


def fitting(name: str, table: Mapping[str, Accelerator]) -> list[str]:
    """The entry of this name, or all whose names begin so, in the order of the table."""
    wanted = name.casefold()
    exact = [key for key in table if key.casefold() == wanted]
    return exact or [key for key in table if wanted and key.casefold().startswith(wanted)]


def look_up(name: str, table: Mapping[str, Accelerator]) -> tuple[str, Accelerator]:
    """The entry of this name, or the only one whose name begins so.

    Raises:
        AcceleratorError: none or several fit. The message names those that come near.
    """
    found = fitting(name, table)
    if len(found) == 1:
        return found[0], table[found[0]]
    if found:
        raise AcceleratorError(f"{name!r} fits {', '.join(found)}: name one of them")
    names = {key.casefold(): key for key in table}
    near = [names[key] for key in difflib.get_close_matches(name.casefold(), names)] or list(table)
    raise AcceleratorError(f"the accelerator {name!r} is not known; known are {', '.join(near)}")
