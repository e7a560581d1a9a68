"""The rendezvous store: a process that hosts torch's TCPStore for one generation.

It listens before the ranks connect, on a port that the gang has never used, and ends with its generation: a rank of an
older one finds nobody. Runs in the child of a warm process that has torch imported.
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
    """Open a store on a free port that is not in `avoid`, tell it to `listening`, and stay until killed."""
    refused = []
    while (store := _open(libuv)).port in avoid:
        refused.append(store)  # kept open, so that the system picks another port
    refused.clear()
    listening(store.port)
    while True:
        signal.pause()


def has_libuv() -> bool:
    """Whether this torch has the libuv store, its default (Debian's has not)."""
    distributed = importlib.import_module("torch.distributed")
    with _mute():
        try:
            # A torch without it says so first; one with it fails to connect to nobody, at once and at length.
            distributed.TCPStore("127.0.0.1", 1, None, False, timedelta(0), use_libuv=True)
        except distributed.DistNetworkError:
            return True
        except distributed.DistError:
            return False
    return True


@contextmanager
def _mute() -> Iterator[None]:
    """Send what native code writes to stderr to nowhere."""
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
    # The host is only the store's own connection to itself: it listens on every address.
    return distributed.TCPStore("127.0.0.1", 0, None, True, _TIMEOUT, wait_for_workers=False, use_libuv=libuv)
