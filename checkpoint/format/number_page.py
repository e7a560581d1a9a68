"""A page of shared memory in which a rank says how its training goes, and which its agent reads when it likes.

The rank makes the page as a memfd and sends it to the agent once. To write costs no call of the kernel, and nobody
waits for anybody. The agent reads copies of the bytes, so a rank that makes the page smaller harms nobody.

The page has a number that is odd while the rank writes (a sequence lock), the length of the text and its checksum,
then the text: JSON of at most 4 kB. The checksum finds what a processor has written in another order.

    {"step": 1200, "at_s": 93.5, "last_step": 5000, "flops": 0.0, "numbers": {"loss": [1200, 2.31]}}
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

PAGE_BYTES = 1 << 13
_HEADER = struct.Struct("=QII")
_ODD = struct.Struct("=Q")
MOST_NUMBERS = 32
SAMPLER_POSITION = "sampler_position"
"""The name of the number that says how many samples finished steps have read."""
NAME_LETTERS = 64
"""The longest name of a number. Longer ones are cut."""
MOST_STEPS = 1 << 53
"""No training has so many."""
_LAST_S = 1e12
"""No clock has run for so long."""


@dataclass(frozen=True, slots=True)
class RankNumbers:
    """What a rank has said. `at_s`: when its step `step` was finished, by the monotonic clock of the node. `last_step`:
    of the whole training; `flops`: floating-point operations of this rank in one step; 0: not known. `numbers`: by
    name, each with the step that it is of. `skips_batches`: its sampler can skip some."""

    step: int = 0
    at_s: float = 0.0
    last_step: int = 0
    flops: float = 0.0
    numbers: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    skips_batches: bool = False


class NumberPage:
    """The rank's end. `descriptor`: of the page, until `close_descriptor`."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("muster-numbers", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, PAGE_BYTES)
        self._memory = mmap.mmap(self.descriptor, PAGE_BYTES)
        self._sequence = 0

    def close_descriptor(self) -> None:
        """The agent has the page. The memory stays."""
        os.close(self.descriptor)

    def write(self, said: RankNumbers) -> None:
        """Replace what the page says. Numbers that no longer fit are left out, the last ones first."""
        numbers = [(name[:NAME_LETTERS], value) for name, value in list(said.numbers.items())[:MOST_NUMBERS]]
        head = {"step": said.step, "at_s": said.at_s, "last_step": said.last_step, "flops": said.flops}
        if said.skips_batches:
            head["skips_batches"] = True
        while True:
            text = json.dumps({**head, "numbers": dict(numbers)}, separators=(",", ":")).encode()
            if len(text) <= PAGE_BYTES - _HEADER.size:
                break
            numbers.pop()
        _ODD.pack_into(self._memory, 0, self._sequence + 1)
        self._memory[_HEADER.size : _HEADER.size + len(text)] = text
        self._sequence += 2
        _HEADER.pack_into(self._memory, 0, self._sequence, len(text), zlib.crc32(text))


def read(descriptor: int, sequence: int) -> tuple[int, RankNumbers] | None:
    """What a page says, with its sequence number. None: nothing newer than `sequence`, or the rank writes just now, or
    has written nonsense.
    """
    try:
        data = os.pread(descriptor, PAGE_BYTES, 0)
        found, length, checksum = _HEADER.unpack_from(data)
    except (OSError, struct.error):
        return None
    text = data[_HEADER.size : _HEADER.size + length]
    if found == sequence or found % 2 or zlib.crc32(text) != checksum:
        return None
    said = _parsed(text)
    return (found, said) if said is not None else None


def _parsed(text: bytes) -> RankNumbers | None:
    try:
        said = json.loads(text)
        numbers = {
            _plain(name): (_step(step), float(value))
            for name, (step, value) in list(said["numbers"].items())[:MOST_NUMBERS]
        }
        at_s, flops = float(said["at_s"]), float(said["flops"])
        if not (0 <= at_s <= _LAST_S and 0 <= flops < math.inf):
            return None
        skips = said.get("skips_batches") is True
        return RankNumbers(_step(said["step"]), at_s, _step(said["last_step"]), flops, numbers, skips)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _plain(name: str) -> str:
    """A name that a message can hold: JSON can hold halves of letters."""
    return name[:NAME_LETTERS].encode(errors="replace").decode()


def _step(value: object) -> int:
    if type(value) is not int or not 0 <= value < MOST_STEPS:
        raise ValueError
    return value
