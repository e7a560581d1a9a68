"""The names that the journal stores, where the code has a better name today.

The journal stores each fact by its class name and its field names, the durable state by its field names, and the cause
of a decision by the event's class name and field names. A class or field that is renamed keeps its stored name: a row
of this table says which. So a journal reads the same in every version, and every version writes the same bytes.

Rename a class: add it to STORED_CLASSES. Rename a field: add it to STORED_FIELDS under the class's present name, and
mark the class with `keeps_stored_names`. A row is never removed.
"""

from typing import TypeVar

from pydantic import ConfigDict, with_config

Stored = TypeVar("Stored")

STORED_CLASSES: dict[str, str] = {}
"""Present class name → stored class name."""

STORED_FIELDS: dict[str, dict[str, str]] = {}
"""Present class name → present field name → stored field name."""

NUMBERS_AS_WRITTEN = ConfigDict(ser_json_inf_nan="strings")
"""Infinity and NaN are stored as strings. By default pydantic writes them as null, and then refuses to read that."""


def stored_class(kind: type) -> str:
    """The name under which instances of `kind` are stored."""
    return STORED_CLASSES.get(kind.__name__, kind.__name__)


def keeps_stored_names(kind: type[Stored]) -> type[Stored]:
    """Class decorator: JSON of `kind` has the stored field names. Applied before `kind` is part of another class."""
    fields = STORED_FIELDS.get(kind.__name__, {})
    config = ConfigDict(alias_generator=lambda name: fields.get(name, name), **NUMBERS_AS_WRITTEN)
    return with_config(config)(kind)
