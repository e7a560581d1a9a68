"""Reads one list from a large JSON object without blocking the event loop.

`json.loads` holds the interpreter's lock for its whole run, in a thread too: about 0.3 s for the nodes of a large
cluster. The functions here return to the event loop after every few records.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final, TypeVar

RECORDS_PER_STEP: Final = 20
"""Records that are read before the event loop runs again."""
T = TypeVar("T")
_decode = json.JSONDecoder().raw_decode


async def records(text: str, key: str) -> AsyncIterator[Any]:
    """Yields the elements of the list at top-level `key` of the JSON object `text`.

    Raises:
        ValueError: `text` is not a JSON object, has no list at `key`, or is nested too deeply.
    """
    at = _list_start(text, key)
    count = 0
    while text[at] != "]":
        record, at = _value(text, at)
        yield record
        at = _skip(text, at, ",")
        count += 1
        if count % RECORDS_PER_STEP == 0:
            await asyncio.sleep(0)


async def convert_in_steps(found: Iterable[Any], read: Callable[[Any], T]) -> list[T]:
    """Applies `read` to each record. The event loop runs after every few records."""
    done: list[T] = []
    for record in found:
        done.append(read(record))
        if len(done) % RECORDS_PER_STEP == 0:
            await asyncio.sleep(0)
    return done


def _list_start(text: str, key: str) -> int:
    at = _skip(text, 0)
    if text[at] != "{":
        raise ValueError(f"expected a JSON object, got {text[at : at + 40]!r}")
    at = _skip(text, at + 1)
    while text[at] != "}":
        name, at = _value(text, at)
        at = _skip(text, at, ":")
        if name == key and text[at] == "[":
            return _skip(text, at + 1)
        _, at = _value(text, at)
        at = _skip(text, at, ",")
    raise ValueError(f"the JSON object has no list {key!r}")


def _value(text: str, at: int) -> tuple[Any, int]:
    """The value that begins at `at`, and the position after it."""
    try:
        return _decode(text, at)
    except RecursionError:
        raise ValueError("the JSON text is nested too deeply") from None


def _skip(text: str, at: int, mark: str = "") -> int:
    """The next position that is neither white space nor `mark`.

    Raises:
        ValueError: the text ends before such a position.
    """
    while at < len(text) and (text[at].isspace() or text[at] == mark):
        at += 1
    if at == len(text):
        raise ValueError("the JSON text ends too early")
    return at
