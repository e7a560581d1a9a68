"""Keeps Python's cyclic garbage collector from running for a while.

A snapshot makes some tuples for each tensor, and drops them all at its end. So many new objects make the collector look
through all objects of the process. With torch imported that takes 0.2 s, and training waits for it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """No collection begins in the `with` block, or in the function that this decorates. What a function made and has
    dropped is not counted."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
