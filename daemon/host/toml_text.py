"""Reads TOML of any content: a text that no configuration of Muster can hold is refused like one that is not TOML.

`tomllib` gives other exceptions for numbers of thousands of digits and for values that are nested thousands of levels
deep, and whoever prints such a value fails. Pure.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

MAX_LEVELS = 32
"""Tables and lists inside each other. Muster's own settings have four."""
_STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?"""|' r"'''.*?'''|" r'"(?:\\.|[^"\\\n])*"|' r"'[^'\n]*'|#[^\n]*", re.DOTALL
)
_LONG_KEY = re.compile(rf"(?<![\w-])(?:[\w-]+[ \t]*\.[ \t]*){{{MAX_LEVELS}}}")
"""A dotted key with more parts. Each part is a table, and `tomllib` takes quadratic time to make them."""
_INTEGERS = range(-(2**63), 2**63)
"""TOML promises 64 bits."""


def loads(text: str) -> dict[str, Any]:
    """The table in `text`.

    Raises:
        tomllib.TOMLDecodeError: `text` is not TOML, has an integer of more than 64 bits, or is nested too deeply.
    """
    too_deep = f"more than {MAX_LEVELS} tables and lists inside each other"
    if _LONG_KEY.search(_STRING_OR_COMMENT.sub("_", text)):
        raise tomllib.TOMLDecodeError(too_deep)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:
        raise tomllib.TOMLDecodeError("an integer has more than 64 bits") from None
    except RecursionError:
        raise tomllib.TOMLDecodeError(too_deep) from None
    check([table])
    return table


def check(values: list[Any]) -> None:
    """Checks `values`, then the values inside them, level by level.

    Raises:
        tomllib.TOMLDecodeError: an integer has more than 64 bits, or there are too many levels.
    """
    for _ in range(MAX_LEVELS + 1):
        if any(isinstance(value, int) and value not in _INTEGERS for value in values):
            raise tomllib.TOMLDecodeError("an integer has more than 64 bits")
        inner = [value for value in values if isinstance(value, dict | list)]
        values = [part for value in inner for part in (value.values() if isinstance(value, dict) else value)]
        if not values:
            return
    raise tomllib.TOMLDecodeError(f"more than {MAX_LEVELS} tables and lists inside each other")
