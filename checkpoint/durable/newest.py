"""Which checkpoint a place leads to."""

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from muster.checkpoint.durable import locations
from muster.checkpoint.durable.durable_store import DurableStore, FoundFolder
from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.errors import CheckpointError


@dataclass(frozen=True)
class _Candidate:
    """A complete checkpoint. `is_foreign`: it belongs to neither this user nor root. `is_renamed`: others can have
    given it its name, and its manifest does not say the same."""

    found: FoundFolder
    gang: str
    is_foreign: bool
    is_renamed: bool

    @property
    def is_believable(self) -> bool:
        return not self.is_foreign and not self.is_renamed


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
    complete = [one for one in _complete(locations.open_store(where)) if gang in ("", one.gang)]
    believable = [one for one in complete if one.is_believable]
    chosen = sorted(believable or complete, key=lambda one: one.found.label.version)
    return {one.gang: one.found for one in chosen}


def last_completed(folders: Iterable[FoundFolder]) -> FoundFolder:
    """That of the checkpoints which was completed last."""
    return max(folders, key=lambda found: (found.completed_ns or 0, found.label.version, found.name))


def newest_of_job(where: str, job: str) -> tuple[str, dict[str, Any]] | None:
    """The newest complete checkpoint of a job in a folder, of any of its runs, with its manifest; None: there is none.

    Args:
        where: a folder of checkpoints; a path or a URL.
        job: as in manifests, not empty.

    Raises:
        OSError: the place can't be read.
    """
    store = locations.open_store(where)
    own = [one.found for one in _complete(store) if one.is_believable]
    for found in sorted(own, key=lambda one: (one.completed_ns or 0, one.label.version), reverse=True):
        manifest = manifest_in(store, found.name)
        if manifest.get("job") == job:
            return locations.join(where, found.name), manifest
    return None


def older_checkpoint(where: str) -> str | None:
    """The newest complete checkpoint beside `where` that is of the same gang, and older; None: there is none.

    Raises:
        OSError: the place can't be read.
    """
    parent, name = locations.split(where)
    label = durable_folders.parse_folder_name(name)
    if label is None or not label.gang:
        return None
    complete = (one.found for one in _complete(locations.open_store(parent)) if one.is_believable)
    older = [
        found
        for found in complete
        if found.label.gang == label.gang and (found.label.version, found.label.serial) < (label.version, label.serial)
    ]
    newest = max(older, key=lambda found: (found.label.version, found.label.serial), default=None)
    return locations.join(parent, newest.name) if newest is not None else None


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


def _complete(store: DurableStore) -> Iterator[_Candidate]:
    for found in store.folders():
        if found.completed_ns is None:
            continue
        is_foreign = found.uid not in (None, 0, os.geteuid())
        manifest: dict[str, Any] = {}
        if not is_foreign and (found.may_be_renamed or not found.label.gang):
            manifest = manifest_in(store, found.name)
        is_renamed = found.may_be_renamed and not durable_folders.says_its_name(manifest, found.label)
        yield _Candidate(found, found.label.gang or str(manifest.get("gang", "")), is_foreign, is_renamed)
