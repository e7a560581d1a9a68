"""How the agents choose the version of a flush while training goes on.

The coordinator names the newest version that it knows. Before its order reaches every agent, the gang may have
committed newer versions and reused the slots of the named one. So each agent holds the version that is committed when
the order arrives, and declares this version in the durable folder. All agents write the newest declared version.

Every agent has that version. An agent that holds a version has one more slot for each rank, so the gang can commit at
most one more version until all agents have declared theirs. What another agent declares is therefore the version that
this agent holds, or the version in its other slot.
"""

import time
from contextlib import suppress
from dataclasses import dataclass

from muster.checkpoint.durable.durable_store import DurableStore
from muster.checkpoint.format.errors import FlushError
from muster.checkpoint.format.versions import Version
from muster.checkpoint.store.flush.give_up import ABANDONED, FlushCancellation

DECLARATIONS_TIMEOUT_S = 60.0
"""Seconds that an agent waits for the declarations of all others."""


def declarations_folder(gang_id: str, serial: int) -> str:
    """The name of the folder in which the agents of a gang declare the version that they hold for a flush."""
    return f".flush-{gang_id}-{serial}"


@dataclass(frozen=True)
class VersionExchange:
    """What one agent needs to choose the version of a flush together with the others.

    `store`, `folder`: where the agents declare their versions.
    `nodes`: all nodes that take part.
    `given_up`: set when this flush shall be given up.
    """

    store: DurableStore
    folder: str
    node: str
    nodes: frozenset[str]
    given_up: FlushCancellation


def choose_version(exchange: VersionExchange, held: Version, timeout_s: float = DECLARATIONS_TIMEOUT_S) -> Version:
    """Declare the version that this node holds, wait for all others, return the newest. Blocks: run it in a thread.

    Raises:
        FlushError: a node has declared nothing in time, or the flush was given up.
        OSError: the folder can't be written. After any error this node's declaration is removed.
    """
    if exchange.nodes <= {exchange.node}:
        return held
    store, declaration = exchange.store, f"{exchange.folder}/{held.generation}-{held.step}-{exchange.node}"
    store.prepare()
    store.make_folder(exchange.folder)
    try:
        store.write(declaration, b"")
        return _wait_for_all(exchange, timeout_s)
    except (OSError, FlushError) as error:
        with suppress(OSError):
            store.remove(declaration)
            store.remove_empty_folder(exchange.folder)  # succeeds if this was the last declaration
        if isinstance(error, FileNotFoundError):  # the flush leader has removed the folder
            raise FlushError(ABANDONED) from error
        raise


def _wait_for_all(exchange: VersionExchange, timeout_s: float) -> Version:
    deadline = time.monotonic() + timeout_s
    while True:
        declared = dict(map(_parse_declaration, exchange.store.names(exchange.folder)))
        if exchange.nodes <= declared.keys():
            return max(declared[node] for node in exchange.nodes)
        if time.monotonic() > deadline:
            silent = ", ".join(sorted(exchange.nodes - declared.keys()))
            raise FlushError(f"{silent} did not say within {timeout_s:.0f} s which version it holds")
        if exchange.given_up.wait(exchange.store.poll_s):
            raise FlushError(f"given up: {exchange.given_up.why}")


def _parse_declaration(name: str) -> tuple[str, Version]:
    generation, step, node = name.split("-", 2)
    return node, Version(int(generation), int(step))


def remove_declarations(store: DurableStore, gang_id: str, serial: int) -> None:
    """Remove the declarations for this flush of the gang and for all flushes before it, as far as possible."""
    prefix = declarations_folder(gang_id, 0).removesuffix("0")
    with suppress(OSError):
        for name in store.names():
            number = name.removeprefix(prefix)
            if number != name and number.isdigit() and int(number) <= serial:
                store.remove_folder(name)
