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

    model_config = ConfigDict(frozen=True, extra="forbid")

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


def look_up(name: str, table: Mapping[str, Accelerator]) -> tuple[str, Accelerator]:
    """The entry of this name, or the only one whose name begins so.

    Raises:
        AcceleratorError: none or several fit. The message names those that come near.
    """
    names = {key.casefold(): key for key in table}
    wanted = name.casefold()
    found = [wanted] if wanted in names else [key for key in names if key.startswith(wanted)]
    if len(found) == 1 and wanted:
        return names[found[0]], table[names[found[0]]]
    if len(found) > 1 and wanted:
        raise AcceleratorError(f"{name!r} fits {', '.join(names[key] for key in found)}: name one of them")
    near = [names[key] for key in difflib.get_close_matches(wanted, names)] or list(table)
    raise AcceleratorError(f"the accelerator {name!r} is not known; known are {', '.join(near)}")
