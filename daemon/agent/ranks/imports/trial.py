"""An import is tried in a process that is thrown away, before a zygote does it for all ranks to come.

Standard library and syntax of Python 3.9.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from types import ModuleType
from typing import Any

from muster.daemon.agent.ranks.imports import fork_safety
from muster.daemon.agent.ranks.imports.seen_imports import is_installed
from muster.daemon.host import process_tree


def may_be_tried(name: str) -> bool:
    """Whether a module is there and installed, as far as can be known without running any of it."""
    try:
        found = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return False
    return found is not None and (found.origin in ("built-in", "frozen") or all(map(is_installed, _places(found))))


def reason_against(name: str, variables: Collection[str]) -> str:
    """Import `name` here, and say why a zygote must not; empty: it may.

    Args:
        variables: those of the environment that a rank has otherwise than the zygote.
    """
    process_tree.adopt_orphans()
    loaded, handlers, given = set(sys.modules), _signal_handlers(), dict(os.environ)
    reads = _Reads(os.environ._data)  # type: ignore[attr-defined]
    os.environ._data = reads  # type: ignore[attr-defined]
    try:
        importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 - a module's own code may raise anything; the script will meet it
        return f"it can't be imported: {type(error).__name__}: {error}"
    decode: Callable[[Any], str] = os.fsdecode
    read = sorted(name for name in variables if reads.all or name in map(decode, reads.names))
    own = sorted(other for other in set(sys.modules) - loaded if _is_of_script(sys.modules[other]))
    os.environ._data = dict(reads)  # type: ignore[attr-defined]
    return (
        (f"it imports {own[0]}, which is not installed" if own else "")
        or (f"it reads {read[0]}, which a rank has otherwise" if read else "")
        or ("it changes the environment" if dict(os.environ) != given else "")
        or ("it handles signals" if _signal_handlers() != handlers else "")
        or ("it starts processes" if process_tree.child_pids() else "")
        or fork_safety.reason_not_to_fork()
    )


class _Reads(dict):  # type: ignore[type-arg]
    """The variables of os.environ, with the names of those that somebody has read."""

    def __init__(self, data: dict[Any, Any]) -> None:
        super().__init__(data)
        self.names: set[Any] = set()
        self.all = False

    def __iter__(self) -> Iterator[Any]:
        self.all = True
        return super().__iter__()

    def __getitem__(self, key: Any) -> Any:
        self.names.add(key)
        return super().__getitem__(key)


def _signal_handlers() -> list[Any]:
    return [signal.getsignal(number) for number in signal.valid_signals()]


def _is_of_script(module: ModuleType) -> bool:
    """Whether a module comes from a file that is not installed. Some are made without a file, or name no real one."""
    places = [place for place in _places(getattr(module, "__spec__", None)) if os.path.isabs(place)]
    return not all(map(is_installed, places))


def _places(spec: Any) -> Iterator[str]:
    """The file of a module, or the folders of a package without one."""
    origin = getattr(spec, "origin", None)
    places = [origin] if isinstance(origin, str) else getattr(spec, "submodule_search_locations", None) or []
    return (place for place in list(places) if isinstance(place, str))
