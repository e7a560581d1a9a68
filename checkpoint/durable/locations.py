"""Which store a place is in: a URL names a store of objects, all else is a path.

`find_problem`: whether a store of objects can take checkpoints. It is looked at before a job is queued, and on each
node before the first step.
"""

import logging
import threading
from pathlib import Path

from muster.checkpoint.durable.durable_store import DurableStore
from muster.checkpoint.durable.object_store import ObjectStore, PackageMissing
from muster.checkpoint.durable.posix_folder import PosixFolder
from muster.checkpoint.format.errors import CheckpointError

_SCHEME = "://"
_LOCAL = ("file", "local")


def is_url(where: str) -> bool:
    """Whether the place is in a store of objects."""
    return _SCHEME in where


def open_store(where: str) -> DurableStore:
    """The store at a path or URL.

    Raises:
        CheckpointError: the URL is wrong, or a package for it is missing.
    """
    if not is_url(where):
        return PosixFolder(Path(where))
    scheme, _, path = where.partition(_SCHEME)
    if scheme in _LOCAL:
        raise CheckpointError(f"{where!r}: name a folder by its path, {path!r}")
    return ObjectStore(where)


def split(where: str) -> tuple[str, str]:
    """The place that a checkpoint is in, and its name there."""
    if not is_url(where):
        path = Path(where)
        return str(path.parent), path.name
    parent, _, name = where.rstrip("/").rpartition("/")
    return parent, name


def join(where: str, name: str) -> str:
    """The checkpoint of that name at a place."""
    return f"{where.rstrip('/')}/{name}" if is_url(where) else str(Path(where, name))


log = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 20.0
"""Seconds for one small object to be written and removed. After that nothing is known of the store."""


def find_problem(url: str, timeout_s: float = CHECK_TIMEOUT_S) -> str:
    """Why no checkpoint can be written below `url`; empty: nothing is known against it.

    A store that does not answer in time is no problem yet: it may answer when the first checkpoint is due.

    Raises:
        PackageMissing: this host can't look.
    """
    found: list[str | PackageMissing] = []

    def look() -> None:
        try:
            found.append(_find_problem(url))
        except PackageMissing as error:
            found.append(error)

    thread = threading.Thread(target=look, name="durable store check", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not found:
        log.warning("durable_dir = %r was not checked: no answer within %g s", url, timeout_s)
        return ""
    if isinstance(found[0], PackageMissing):
        raise found[0]
    return found[0]


def _find_problem(url: str) -> str:
    try:
        ObjectStore(url).check()
    except PackageMissing:
        raise
    except CheckpointError as error:
        return f"durable_dir = {error}"
    except PermissionError as error:
        return f"durable_dir = {url!r} can't be written to or listed ({error.strerror}): give the job's user the right"
    except OSError as error:
        if ObjectStore.is_absent(error):
            return f"durable_dir = {url!r}: {error.strerror}: create it, or name another one"
        log.warning("durable_dir = %r was not checked: %s", url, error.strerror)
    return ""
