"""Reads a job in YAML, with the values that YAML 1.2 and TOML agree on.

PyYAML reads YAML 1.1, in which the text 4:00:00 is the number 14400, `no` is false and 70e9 is a text. Here a value is
a number, true, false, null, or a text. Aliases and repeated keys are refused: some lines of aliases can mean gigabytes,
and of two equal keys one would be ignored. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from muster.daemon.host import toml_text

_RESOLVED = (
    ("tag:yaml.org,2002:bool", r"true|false", "tf"),
    ("tag:yaml.org,2002:null", r"null|~|", "n~"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+", "-+0123456789"),
    ("tag:yaml.org,2002:float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
)
"""Tag, form and first characters of every value that is no text."""


class YamlError(ValueError):
    """The text is no YAML that a job can be. The message says where."""


def loads(text: str) -> dict[str, Any]:
    """The table in `text`.

    Raises:
        YamlError: `text` is not YAML, is no table, or has an alias, a repeated key, a number of more than 64 bits, or
            too many levels.
    """
    try:
        table = yaml.load(text, _Loader)  # a safe loader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise YamlError(f"{where}{error.problem or error.context}"[:300]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise YamlError(str(error)[:300]) from None
    except RecursionError:
        raise YamlError(f"more than {toml_text.MAX_LEVELS} tables and lists inside each other") from None
    if not isinstance(table, dict):
        raise YamlError('it is no table: each line has a key and a value, for example "nodes: 8"')
    try:
        toml_text.check([table])
    except ValueError as error:
        raise YamlError(str(error)) from None
    return table


class _Loader(yaml.SafeLoader):
    """Makes tables, lists, numbers, truth values and texts."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  # PyYAML's own name

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuses aliases."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # as the stubs have it
            raise yaml.composer.ComposerError(None, None, "an alias (*): write the value again", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuses repeated keys, and keys that are no text."""
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise yaml.constructor.ConstructorError(None, None, "a key must be a text", key.start_mark)
            if key.value in keys:
                words = f"the key {key.value[:60]!r} is there twice"
                raise yaml.constructor.ConstructorError(None, None, words, key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """A decimal number: 010 is ten."""
        return int(self.construct_scalar(node))

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        """A number with a point or an exponent."""
        return float(self.construct_scalar(node))


for _tag, _form, _first in _RESOLVED:
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_form})$"), list(_first))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^$"), [""])
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
