"""The rendezvous store: a process that hosts torch's TCPStore for one generation.

The store listens before the ranks connect, on a port on which this agent has opened none before, and ends with its
generation. So a rank of an older generation finds no store. Runs in a child of a zygote that has imported torch.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

_TIMEOUT = timedelta(minutes=5)


def serve(avoid: Collection[int], libuv: bool, listening: Callable[[int], None]) -> NoReturn:
    """Open a store on a free port that is not in `avoid`, pass the port to `listening`, and run until killed."""
    refused = []
    while (store := _open(libuv)).port in avoid:
        refused.append(store)  # stays open, so that the system picks another port
    refused.clear()
    listening(store.port)
    while True:
        signal.pause()


def has_libuv() -> bool:
    """Whether this torch has the libuv store, its default (Debian's torch has not)."""
    distributed = importlib.import_module("torch.distributed")
    with _discard_stderr():
        try:
            # A torch without libuv says so first: torch 2.6 by a RuntimeError, a newer one by a DistError. A torch
            # with libuv fails at once to connect, with a long message.
            distributed.TCPStore("127.0.0.1", 1, None, False, timedelta(0), use_libuv=True)
        except distributed.DistNetworkError:
            return True
        except RuntimeError:
            return False
    return True


@contextmanager
def _discard_stderr() -> Iterator[None]:
    """Discard what native code writes to stderr."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _open(libuv: bool) -> Any:
    distributed = importlib.import_module("torch.distributed")
    # The host is only used for the store's connection to itself. The store listens on every address.
    return distributed.TCPStore("127.0.0.1", 0, None, True, _TIMEOUT, wait_for_workers=False, use_libuv=libuv)
