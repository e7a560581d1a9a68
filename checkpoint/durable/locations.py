"""Which store a place is in: a URL names a store of objects, all else is a path."""

from pathlib import Path

from muster.checkpoint.durable.durable_store import DurableStore
from muster.checkpoint.durable.object_store import ObjectStore
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
