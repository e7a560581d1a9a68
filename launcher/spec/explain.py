"""Error messages for pydantic's validation errors: the key, the value, and what would be valid. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

_SHOWN = 60
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9_]{19,}")
"""One that TOML cannot hold: the command line gives it as a text."""
_SECRET = "env"
"""The table whose values are never shown: standard error is often kept, for example by continuous integration."""
_OF_KEY = "[key]"
"""pydantic's mark for a mistake in a key of a table, not in its value."""
LINE_BREAK = "\n"
"""Between the mistakes that one check of the whole job has found."""
_REQUIREMENTS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "string_type": 'must be a string in quotes, "like this"',
    "tuple_type": 'must be a list of strings, ["like", "this"]',
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "string_too_short": "must not be empty",
    "finite_number": "must be a finite number",
}


def explain_errors(error: ValidationError, model: type[BaseModel]) -> Iterator[str]:
    """Yields one line for each error."""
    for problem in error.errors():
        path = [str(part) for part in problem["loc"] if part != _OF_KEY]
        key = ".".join(path)
        is_shown = path[:1] != [_SECRET] and not isinstance(problem["input"], dict)  # a table may be a misspelt [env]
        given = f"{key} = {_short_repr(problem['input'])}" if is_shown else key
        match problem["type"]:
            case "extra_forbidden":
                yield f"{given}: unknown key{_suggestion(path, model)}"
            case "missing":
                yield f"{key}: missing; this key is required"
            case _ if not path:
                yield from _plain(problem["msg"]).split(LINE_BREAK)
            case _:
                yield f"{given}: {_requirement(problem)}"


def _requirement(problem: Any) -> str:
    limits, given = problem.get("ctx", {}), problem["input"]
    match problem["type"]:
        case "int_type" if isinstance(given, str) and _WHOLE_NUMBER.fullmatch(given):
            return "must be a whole number of at most 18 digits"
        case "greater_than_equal":
            return f"must be {limits['ge']:.15g} or more"
        case "greater_than":
            return f"must be more than {limits['gt']:.15g}"
        case "literal_error":
            return f"must be {limits['expected']}"
        case "less_than_equal":
            return f"must be {limits['le']:.15g} or less"
        case "too_long":
            return f"must have {limits['max_length']} entries or less"
        case kind:
            return _REQUIREMENTS.get(kind, _plain(problem["msg"]))


def _plain(message: str) -> str:
    return message.removeprefix("Value error, ")


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _suggestion(path: Sequence[str], model: type[BaseModel]) -> str:
    table = _table(path[:-1], model)
    if table is None:
        return ""
    near = difflib.get_close_matches(path[-1].lower(), table.model_fields, n=1)
    if near:
        return f"; did you mean {'.'.join((*path[:-1], near[0]))}?"
    if elsewhere := [name for name, sub in _tables(model) if path[-1] in sub.model_fields]:
        return f"; it belongs in the table [{elsewhere[0]}]"
    if path[:-1] and path[-1] in model.model_fields:
        return f"; it belongs at the top of the file, before the first table, not in [{path[0]}]"
    return f"; known keys are {', '.join(sorted(table.model_fields))}"


def _table(path: Sequence[str], model: type[BaseModel]) -> type[BaseModel] | None:
    return dict(_tables(model)).get(path[0]) if path else model


def _tables(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield name, field.annotation
