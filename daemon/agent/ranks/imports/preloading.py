"""The modules that a zygote imports before it is ready.

Standard library and syntax of Python 3.9.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

from muster.daemon.host import process_tree


@dataclass
class Preloaded:
    """notes: one line for each problem. broken: the first module that is installed and can't be imported, and why."""

    notes: list[str]
    broken: str = ""


def preload(modules: Sequence[str]) -> Preloaded:
    """Import `modules`. An import that fails is left to the script."""
    found = Preloaded([])
    notes = found.notes
    for name in modules:
        threads = process_tree.thread_count()
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a module's own code may raise anything; the script will meet it again
            words = f"{name} can't be imported: {type(error).__name__}: {error}"
            notes.append(f"preload: {words}")
            if not found.broken and _is_installed(name, error, modules):
                found.broken = words
        if process_tree.thread_count() > threads:
            notes.append(
                f"preload: {name} starts threads, so ranks can't be forked from here: take it out of `preload`, "
                "or keep its libraries to one thread (OMP_NUM_THREADS=1, OPENBLAS_NUM_THREADS=1)"
            )
    return found


def _is_installed(name: str, error: Exception, modules: Sequence[str]) -> bool:
    """Whether `name` is installed, although its import has failed with `error`. Muster's own modules do not count."""
    roots = {module.partition(".")[0] for module in modules}
    absent = isinstance(error, ModuleNotFoundError) and error.name in roots
    return not absent and not name.startswith("muster.")
