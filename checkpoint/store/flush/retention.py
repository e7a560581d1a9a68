"""Which of its own durable checkpoints a gang removes, and how: by number and age, after a newer one is complete.

Promises to remove nothing that Muster has not written for this gang: the folder's name and its manifest name the gang,
the folder belongs to this user, it is no link, and all in it are files that a flush writes. A folder that holds
anything else stays.

A folder that is about to be removed first gets the name of an unfinished flush. So what is left after a crash is taken
for no checkpoint, and the next flush of the gang removes it.
"""

import logging
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from muster.checkpoint.format import durable_folders
from muster.checkpoint.format.versions import Version

log = logging.getLogger(__name__)

_RANK_FILE = re.compile(r"__\d+_0\.distcp")


@dataclass(frozen=True)
class Retention:
    """What a gang keeps.

    `keep`: the newest so many checkpoints stay. `keep_s`: older ones stay for so many seconds. 0: no such limit; the
    newest one always stays. Without both, all stay.
    """

    keep: int = 0
    keep_s: float = 0.0


KEEP_ALL = Retention()


@dataclass(frozen=True)
class _OwnCheckpoint:
    path: Path
    version: Version
    completed_ns: int


def remove_old(newest: Path, gang: str, serial: int, retention: Retention) -> list[Path]:
    """Remove checkpoints of `gang` beside `newest` that need not stay; returns their folders.

    The age of a checkpoint is how much later `newest` was completed. So only the file server's clock counts.

    Args:
        newest: the folder that was just completed.
        gang: the gang's id.
        serial: the number of the flush that has completed it.
        retention: what stays.

    Raises:
        OSError: a folder can't be read or removed. No folder is left half removed under its own name.
    """
    if retention == KEEP_ALL:
        return []
    own = sorted(_own_checkpoints(newest.parent, gang), key=lambda one: one.version, reverse=True)
    completed_ns = next((one.completed_ns for one in own if one.path == newest), 0)
    removed = []
    for one in own[max(1, retention.keep) :]:
        age_s = (completed_ns - one.completed_ns) / 1e9
        if one.path != newest and (not retention.keep_s or age_s > retention.keep_s) and _remove(one, gang, serial):
            removed.append(one.path)
    return removed


def _own_checkpoints(folder: Path, gang: str) -> Iterator[_OwnCheckpoint]:
    for path in folder.iterdir():
        label = durable_folders.parse_folder_name(path.name)
        if label is None or label.gang != gang:
            continue
        metadata, found = path / durable_folders.METADATA, path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or not metadata.is_file():
            continue
        if durable_folders.gang_of_manifest(path) == gang:
            yield _OwnCheckpoint(path, label.version, metadata.stat().st_mtime_ns)


def _remove(checkpoint: _OwnCheckpoint, gang: str, serial: int) -> bool:
    """Remove a folder with all its files; returns False if it holds anything that no flush has written."""
    if foreign := sorted(entry.name for entry in os.scandir(checkpoint.path) if not _is_written_by_a_flush(entry)):
        log.warning("%s stays: it holds %s, which Muster has not written", checkpoint.path, foreign[0])
        return False
    aside = checkpoint.path.with_name(durable_folders.temporary_folder_name(checkpoint.version, gang, serial))
    checkpoint.path.rename(aside)
    for name in os.listdir(aside):
        (aside / name).unlink()
    aside.rmdir()
    return True


def _is_written_by_a_flush(entry: "os.DirEntry[str]") -> bool:
    known = entry.name in (durable_folders.METADATA, durable_folders.MANIFEST) or _RANK_FILE.fullmatch(entry.name)
    return bool(known) and entry.is_file(follow_symlinks=False)
