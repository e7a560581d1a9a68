"""How the agents choose the version of a flush while training goes on.

The coordinator names the newest version that it knows. Before its order reaches every agent, the gang may have
committed newer versions and reused the slots of the named one. So each agent holds the version that is committed when
the order arrives, and declares this version in the durable folder. All agents write the newest declared version.

Every agent has that version. An agent that holds a version has one more slot for each rank, so the gang can commit at
most one more version until the flush is over. What another agent declares is therefore the version that this agent
holds, or the version in its other slot.
"""

import os
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.errors import FlushError
from muster.checkpoint.format.versions import Version
from muster.daemon.host import own_folder

DECLARATIONS_TIMEOUT_S = 60.0
"""Seconds that an agent waits for the declarations of all others."""

_POLL_S = 0.01


def declarations_folder(durable_folder: Path, gang_id: str, serial: int) -> Path:
    """Where the agents of a gang declare the version that they hold for a flush."""
    return durable_folder / f".flush-{gang_id}-{serial}"


@dataclass(frozen=True)
class VersionExchange:
    """What one agent needs to choose the version of a flush together with the others.

    `folder`: where the agents declare their versions.
    `nodes`: all nodes that take part.
    `superseded`: set when this flush shall be given up.
    """

    folder: Path
    node: str
    nodes: frozenset[str]
    superseded: threading.Event


def choose_version(exchange: VersionExchange, held: Version, timeout_s: float = DECLARATIONS_TIMEOUT_S) -> Version:
    """Declare the version that this node holds, wait for all others, return the newest. Blocks: run it in a thread.

    Raises:
        FlushError: a node has declared nothing in time, or the flush was superseded.
        OSError: the folder can't be written. After any error this node's declaration is removed.
    """
    if exchange.nodes <= {exchange.node}:
        return held
    declaration = exchange.folder / f"{held.generation}-{held.step}-{exchange.node}"
    exchange.folder.parent.mkdir(durable_folders.FOLDER_MODE, parents=True, exist_ok=True)
    own_folder.make(exchange.folder, durable_folders.FOLDER_MODE)
    try:
        declaration.touch()
        return _wait_for_all(exchange, timeout_s)
    except (OSError, FlushError):
        with suppress(OSError):
            declaration.unlink(missing_ok=True)
            exchange.folder.rmdir()  # succeeds if this was the last declaration
        raise


def _wait_for_all(exchange: VersionExchange, timeout_s: float) -> Version:
    deadline = time.monotonic() + timeout_s
    while True:
        declared = dict(_parse_declaration(name) for name in os.listdir(exchange.folder))
        if exchange.nodes <= declared.keys():
            return max(declared[node] for node in exchange.nodes)
        if time.monotonic() > deadline:
            silent = ", ".join(sorted(exchange.nodes - declared.keys()))
            raise FlushError(f"{silent} did not say within {timeout_s:.0f} s which version it holds")
        if exchange.superseded.wait(_POLL_S):
            raise FlushError("given up: a newer flush was ordered")


def _parse_declaration(name: str) -> tuple[str, Version]:
    generation, step, node = name.split("-", 2)
    return node, Version(int(generation), int(step))


def remove_declarations(durable_folder: Path, gang_id: str, serial: int) -> None:
    """Remove the declarations for this flush of the gang and for all flushes before it."""
    if not durable_folder.is_dir():
        return
    prefix = declarations_folder(durable_folder, gang_id, 0).name.removesuffix("0")
    for path in durable_folder.iterdir():
        number = path.name.removeprefix(prefix)
        if number != path.name and number.isdigit() and int(number) <= serial:
            shutil.rmtree(path, ignore_errors=True)
