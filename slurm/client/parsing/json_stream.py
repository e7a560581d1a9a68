"""Reads one list out of a large JSON object without keeping the event loop from its other work.

`json.loads` holds the interpreter for its whole length, in a thread too: some 0.3 s for the nodes of a large
cluster. Here the loop gets its turn after every few records.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final, TypeVar

RECORDS_A_TURN: Final = 20
T = TypeVar("T")
_decode = json.JSONDecoder().raw_decode


async def records(text: str, key: str) -> AsyncIterator[Any]:
    """Yields the elements of the list at top-level `key` of the JSON object `text`.

    ValueError if `text` is not such an object or has no such list.
    """
    at = _list_start(text, key)
    count = 0
    while text[at] != "]":
        record, at = _decode(text, at)
        yield record
        at = _skip(text, at, ",")
        count += 1
        if count % RECORDS_A_TURN == 0:
            await asyncio.sleep(0)


async def in_turns(found: Iterable[Any], read: Callable[[Any], T]) -> list[T]:
    """`read` of each of `found`, with the loop's turn after every few."""
    done: list[T] = []
    for record in found:
        done.append(read(record))
        if len(done) % RECORDS_A_TURN == 0:
            await asyncio.sleep(0)
    return done


def _list_start(text: str, key: str) -> int:
    at = _skip(text, 0)
    if text[at] != "{":
        raise ValueError(f"expected a JSON object, got {text[at : at + 40]!r}")
    at = _skip(text, at + 1)
    while text[at] != "}":
        name, at = _decode(text, at)
        at = _skip(text, at, ":")
        if name == key and text[at] == "[":
            return _skip(text, at + 1)
        _, at = _decode(text, at)
        at = _skip(text, at, ",")
    raise ValueError(f"the JSON object has no list {key!r}")


def _skip(text: str, at: int, mark: str = "") -> int:
    """The next place that is neither white space nor `mark`; ValueError at the end of the text."""
    while at < len(text) and (text[at].isspace() or text[at] == mark):
        at += 1
    if at == len(text):
        raise ValueError("the JSON text ends too early")
    return at
