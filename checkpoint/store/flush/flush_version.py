"""Which version a flush writes while training goes on.

The coordinator names the newest version that it knows of; by the time its order has reached every agent, the gang may
have committed newer ones and freed that one's slots. So every agent holds what it has committed when the order reaches
it, says so in the durable folder, and all write the newest of what was said.

Everyone has that one: an agent that holds a version has one free slot a rank left, so the gang can commit one more
version and then none until the flush lets go. What others say is therefore either what this agent holds, or what fills
its other slot.
"""

import os
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from muster.checkpoint.format.errors import FlushError
from muster.checkpoint.format.versions import Version

ALL_TIMEOUT_S = 60.0

_POLL_S = 0.01


def folder_of(durable: Path, gang_id: str, serial: int) -> Path:
    """Where the agents of a gang say what they hold for a flush."""
    return durable / f".flush-{gang_id}-{serial}"


@dataclass(frozen=True)
class VersionExchange:
    """What one agent needs to agree with the others on what a flush writes.

    `folder`: where they say what they hold; `nodes`: all that do; `superseded`: set when the flush shall be given up.
    """

    folder: Path
    node: str
    nodes: frozenset[str]
    superseded: threading.Event


def agree(talk: VersionExchange, held: Version, timeout_s: float = ALL_TIMEOUT_S) -> Version:
    """Say what this node holds, wait for all others, return the newest. Blocks: run it in a thread.

    Raises:
        FlushError: a node said nothing in time, or the flush was superseded. OSError: the folder can't be written.
            This node's word is taken back.
    """
    if talk.nodes <= {talk.node}:
        return held
    said = talk.folder / f"{held.generation}-{held.step}-{talk.node}"
    try:
        talk.folder.mkdir(parents=True, exist_ok=True)
        said.touch()
        return _await_all(talk, timeout_s)
    except (OSError, FlushError):
        with suppress(OSError):
            said.unlink(missing_ok=True)
            talk.folder.rmdir()  # if it was the last word
        raise


def _await_all(talk: VersionExchange, timeout_s: float) -> Version:
    end = time.monotonic() + timeout_s
    while True:
        heard = dict(_parse(name) for name in os.listdir(talk.folder))
        if talk.nodes <= heard.keys():
            return max(heard[name] for name in talk.nodes)
        if time.monotonic() > end:
            silent = ", ".join(sorted(talk.nodes - heard.keys()))
            raise FlushError(f"{silent} did not say within {timeout_s:.0f} s which version it holds")
        if talk.superseded.wait(_POLL_S):
            raise FlushError("given up: a newer flush was ordered")


def _parse(name: str) -> tuple[str, Version]:
    generation, step, node = name.split("-", 2)
    return node, Version(int(generation), int(step))


def forget(durable: Path, gang_id: str, serial: int) -> None:
    """Remove what was said for this flush of the gang and those before it."""
    if not durable.is_dir():
        return
    begin = folder_of(durable, gang_id, 0).name.removesuffix("0")
    for path in durable.iterdir():
        number = path.name.removeprefix(begin)
        if number != path.name and number.isdigit() and int(number) <= serial:
            shutil.rmtree(path, ignore_errors=True)
