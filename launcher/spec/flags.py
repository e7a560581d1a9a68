"""Every key of job.toml that has one value is also an option of the command line: --parallelism.tensor 8.

The options follow from job.schema.json, so a new key is an option at once. That file is read, and not the classes that
it is made from: the help appears before those are imported. An option replaces the file's value.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from muster.daemon.host import toml_text

Tables = dict[str, Any]
_SCHEMA = Path(__file__).with_name("job.schema.json")
_PREFIX = "key "
"""Of the names under which argparse keeps the values: no other option's name has a space."""
_NUMBER_OR_BOOL = re.compile(r"[\w.+-]+")
_SCALARS = {"string", "integer", "number", "boolean"}
_INSTEAD = {"nodes": "gpus", "gpus": "nodes"}
"""Keys of which only one is given: the option wins."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A key with one value."""

    path: tuple[str, ...]
    """Table and key, or the key alone."""
    is_text: bool
    """Whether the value is taken as it is. Others are read as TOML reads them."""
    metavar: str
    help: str

    @property
    def option(self) -> str:
        """As the command line has it."""
        return f"--{'.'.join(self.path).replace('_', '-')}"


@cache
def flags() -> tuple[Flag, ...]:
    """The options of all keys, in the order of the schema."""
    schema = json.loads(_SCHEMA.read_text())
    return tuple(_flags(schema, schema["$defs"], ()))


def _flags(table: Mapping[str, Any], tables: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[Flag]:
    for key, value in table["properties"].items():
        if "$ref" in value:
            yield from _flags(tables[value["$ref"].rpartition("/")[2]], tables, (*path, key))
            continue
        kinds = {kind.get("type", "") for kind in value.get("anyOf", [value])} - {"null"}
        if kinds <= _SCALARS:
            metavar = "TEXT" if "string" in kinds else "true|false" if kinds == {"boolean"} else "N"
            yield Flag((*path, key), "string" in kinds, metavar, value.get("description", "").replace("\n", " "))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each key of job.toml to the command line. A usage with all of them would fill a screen, before
    each error too."""
    parser.usage = "%(prog)s [options] job.toml"
    group = parser.add_argument_group(
        "keys of job.toml", "They replace the file's values. docs/JOBTOML.md explains them."
    )
    for flag in flags():
        group.add_argument(
            flag.option,
            dest=_PREFIX + flag.option,
            metavar=flag.metavar,
            default=argparse.SUPPRESS,
            help=flag.help.replace("%", "%%"),
        )


def with_options(given: Tables, options: argparse.Namespace) -> Tables:
    """The tables of job.toml, with the values of the command line's options."""
    return with_texts(given, chosen(options))


def chosen(options: argparse.Namespace) -> dict[str, str]:
    """The texts of the command line's options, by the options' names."""
    return {name.removeprefix(_PREFIX): text for name, text in vars(options).items() if name.startswith(_PREFIX)}


def with_texts(given: Tables, texts: Mapping[str, str]) -> Tables:
    """The tables of job.toml, with the texts of options such as "--parallelism.tensor"."""
    merged = dict(given)
    for flag in flags():
        if (text := texts.get(flag.option)) is not None:
            _put(merged, flag.path, text if flag.is_text else _value(text))
    return merged


def _put(tables: Tables, path: tuple[str, ...], value: Any) -> None:
    *above, key = path
    if not above:
        tables.pop(_INSTEAD.get(key, ""), None)
        tables[key] = value
    elif isinstance(table := tables.get(above[0], {}), dict):  # anything else is refused as a table
        tables[above[0]] = {**table, key: value}


def _value(text: str) -> Any:
    """A number or a truth value. Other text stays as it is: the check of the key refuses it."""
    try:
        return toml_text.loads(f"value = {text}")["value"] if _NUMBER_OR_BOOL.fullmatch(text) else text
    except tomllib.TOMLDecodeError:
        return text
