"""Which of its own durable checkpoints a gang removes, and how: by number and age, after a newer one is complete.

Promises to remove nothing that Muster has not written for this gang: the folder's name and its manifest name the gang
and the version, the folder belongs to this user (where the storage knows users), and all in it are files that a flush
writes. A folder that holds anything else stays.

A folder that is about to be removed first gets the name of an unfinished flush; in a store of objects its metadata is
removed first. So what is left after a crash is taken for no checkpoint, and a later flush of the gang removes it.
"""

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from muster.checkpoint.durable.durable_store import DurableStore, Entry, FoundFolder
from muster.checkpoint.durable.newest import manifest_in
from muster.checkpoint.format import durable_folders

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


def remove_old(store: DurableStore, newest: str, gang: str, serial: int, retention: Retention) -> list[str]:
    """Remove checkpoints of `gang` beside `newest` that need not stay; returns their names.

    The age of a checkpoint is how much later `newest` was completed. So only the clock of the storage counts.

    Args:
        store: where they are.
        newest: the name of the checkpoint that was just completed.
        gang: the gang's id.
        serial: the number of the flush that has completed it.
        retention: what stays.

    Raises:
        OSError: a folder can't be read or removed. What is left of it is no checkpoint any more.
    """
    if retention == KEEP_ALL:
        return []
    own = sorted(_own_checkpoints(store, gang), key=lambda one: (one.label.version, one.label.serial), reverse=True)
    completed_ns = next((one.completed_ns or 0 for one in own if one.name == newest), 0)
    removed = []
    for one in own[max(1, retention.keep) :]:
        age_s = (completed_ns - (one.completed_ns or 0)) / 1e9
        if one.name != newest and (not retention.keep_s or age_s > retention.keep_s) and _remove(store, one, serial):
            removed.append(one.name)
    return removed


def _own_checkpoints(store: DurableStore, gang: str) -> Iterator[FoundFolder]:
    for found in store.folders(lambda named: named == gang):
        is_ours = found.uid in (None, os.geteuid()) and found.completed_ns is not None
        if is_ours and durable_folders.says_its_name(manifest_in(store, found.name), found.label):
            yield found


def _remove(store: DurableStore, found: FoundFolder, serial: int) -> bool:
    """Remove a folder with all its files; returns False if it holds anything that no flush has written."""
    entries = store.entries(found.name)
    if foreign := sorted(entry.name for entry in entries if not _is_written_by_a_flush(entry)):
        log.warning("%s in %s stays: it holds %s, which Muster has not written", found.name, store.where, foreign[0])
        return False
    aside = store.retire(
        found.name, durable_folders.temporary_folder_name(found.label.version, found.label.gang, serial)
    )
    # The metadata is the first: without it, the rest is no checkpoint.
    store.remove(*sorted(f"{aside}/{entry.name}" for entry in store.entries(aside)))
    store.remove_empty_folder(aside)
    return True


def _is_written_by_a_flush(entry: Entry) -> bool:
    known = entry.name in (durable_folders.METADATA, durable_folders.MANIFEST) or _RANK_FILE.fullmatch(entry.name)
    return bool(known) and entry.is_plain
