"""Which checkpoint a place leads to."""

import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

from muster.checkpoint.durable import locations
from muster.checkpoint.durable.durable_store import DurableStore, FoundFolder
from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.format.versions import Version


class _Candidate:
    """A complete checkpoint. Its manifest is read only where it decides, because those of large jobs have megabytes."""

    def __init__(self, store: DurableStore, found: FoundFolder) -> None:
        self.found = found
        self._store = store

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest; empty if another user has written it, which may be a named pipe."""
        return {} if self.is_foreign else manifest_in(self._store, self.found.name)

    @property
    def is_foreign(self) -> bool:
        """It belongs to neither this user nor root."""
        return self.found.uid not in (None, 0, os.geteuid())

    @property
    def gang(self) -> str:
        """The gang that has written it; empty: nothing names one."""
        return self.found.label.gang or str(self.manifest.get("gang", ""))

    @property
    def is_believable(self) -> bool:
        """It is not foreign, and where others can have given it its name, its manifest says the same."""
        is_named = not self.found.may_be_renamed or durable_folders.says_its_name(self.manifest, self.found.label)
        return not self.is_foreign and is_named

    @property
    def order(self) -> tuple[Version, int]:
        """Grows from one checkpoint of a gang to the next."""
        return self.found.label.version, self.found.label.serial


def newest_checkpoint(where: str, gang: str = "") -> str | None:
    """The newest complete checkpoint: `where` itself if it is one, otherwise the newest one in it.

    Within a gang this is the newest version by (generation, step). Of the newest checkpoints of several gangs it is the
    one that was completed last. A link is no checkpoint, and a folder that others have renamed is none. A checkpoint of
    another user counts only where there is no other: whoever loads it is told why that is refused.

    Args:
        where: a checkpoint, or a place with checkpoints; a path or a URL.
        gang: if not empty, only checkpoints of this gang count.

    Raises:
        OSError: the place can't be read.
        CheckpointError: the URL is wrong, or a package for it is missing.
    """
    if is_complete(where):
        return where
    found = newest_of_gangs(where, gang)
    return locations.join(where, last_completed(found.values()).name) if found else None


def newest_of_gangs(where: str, gang: str = "") -> dict[str, FoundFolder]:
    """The newest complete checkpoint of each gang in a place; the gang is empty where nothing names it.

    `gang` as in `newest_checkpoint`. A checkpoint of another user counts only where there is no other.

    Raises:
        OSError: the place can't be read.
        CheckpointError: the URL is wrong, or a package for it is missing.
    """
    if not locations.is_url(where) and not os.path.isdir(where):
        return {}
    by_gang = _newest_first(where, lambda named: gang in ("", named))
    complete = {name: found for name, found in by_gang.items() if gang in ("", name)}
    chosen = {name: one for name, found in complete.items() if (one := _first_believable(found)) is not None}
    return {name: one.found for name, one in (chosen or {name: one[0] for name, one in complete.items()}).items()}


def last_completed(folders: Iterable[FoundFolder]) -> FoundFolder:
    """That of the checkpoints which was completed last."""
    return max(folders, key=lambda found: (found.completed_ns or 0, found.label.version, found.name))


def last_completed_first(where: str, is_asked: Callable[[str], bool]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The newest checkpoint of each gang that is asked for, with its manifest; first the one that was completed last.

    A manifest is read when the caller comes to it, or if others can rename what lies there.

    Args:
        where: a folder of checkpoints; a path or a URL.
        is_asked: says it of the id of a gang.

    Raises:
        OSError: the place can't be read.
    """
    asked = (found for gang, found in _newest_first(where, is_asked).items() if is_asked(gang))
    found = [one for one in map(_first_believable, asked) if one is not None]
    for one in sorted(found, key=lambda one: one.found.completed_ns or 0, reverse=True):
        yield locations.join(where, one.found.name), one.manifest


def older_checkpoint(where: str) -> str | None:
    """The newest complete checkpoint beside `where` that is of the same gang, and older; None: there is none.

    Raises:
        OSError: the place can't be read.
    """
    parent, name = locations.split(where)
    label = durable_folders.parse_folder_name(name)
    if label is None or not label.gang:
        return None
    own = _newest_first(parent, lambda gang: gang == label.gang).get(label.gang, [])
    older = _first_believable(one for one in own if one.order < (label.version, label.serial))
    return locations.join(parent, older.found.name) if older is not None else None


def is_complete(where: str) -> bool:
    """Whether a path or a URL is a complete checkpoint."""
    parent, name = locations.split(where)
    if not name or (locations.is_url(where) and parent.endswith("/")):  # a bucket
        return False
    if locations.is_url(where) and durable_folders.parse_folder_name(name) is not None:
        return not locations.open_store(parent).is_open(name, name)
    if locations.is_url(where):
        return any(entry.name == durable_folders.METADATA for entry in locations.open_store(where).entries())
    try:
        return stat.S_ISREG(os.lstat(os.path.join(where, durable_folders.METADATA)).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def finished_steps_of(where: str, store: DurableStore | None = None) -> int:
    """The number of finished steps that a checkpoint holds. `store`: the opened checkpoint itself; None: what is at
    `where` now.

    Raises:
        CheckpointError: neither the manifest nor the name says it.
    """
    name = locations.split(where)[1]
    try:
        return int(manifest_in(store or locations.open_store(where), "")["step"])
    except (KeyError, TypeError, ValueError):
        pass
    label = durable_folders.parse_folder_name(name)
    if label is None:
        raise CheckpointError(
            f"{where} has no {durable_folders.MANIFEST}, and its name doesn't say which step it holds: rename it to "
            "step_00000123_g0, with the number of its finished steps"
        )
    return label.version.step


def manifest_in(store: DurableStore, folder: str) -> dict[str, Any]:
    """The manifest in a folder; empty if there is none, or if it can't be read."""
    name = f"{folder}/{durable_folders.MANIFEST}" if folder else durable_folders.MANIFEST
    try:
        return durable_folders.parse_manifest(store.read(name, durable_folders.MOST_MANIFEST_BYTES))
    except OSError:
        return {}


def _newest_first(where: str, is_asked: Callable[[str], bool]) -> dict[str, list[_Candidate]]:
    """The complete checkpoints of each gang that is asked for, and of all gangs that only a manifest names."""
    store = locations.open_store(where)
    by_gang: dict[str, list[_Candidate]] = defaultdict(list)
    for found in store.folders(lambda named: not named or is_asked(named)):
        if found.completed_ns is not None:
            one = _Candidate(store, found)
            by_gang[one.gang].append(one)
    return {gang: sorted(found, key=lambda one: one.order, reverse=True) for gang, found in by_gang.items()}


def _first_believable(candidates: Iterable[_Candidate]) -> _Candidate | None:
    return next((one for one in candidates if one.is_believable), None)
