"""Keeps Python's cyclic garbage collector from running for a while.

A snapshot makes some tuples for each tensor, and drops them all when it is done. Python counts only how many objects
have come, and then looks through all objects of the process: 0.2 s with torch imported, in which training waits.
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
