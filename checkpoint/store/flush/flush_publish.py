"""The flush leader's part of a flush: complete the folder that all nodes have written, and give it its final name.

The flush leader is the node that writes rank 0's file. It waits for the notes of all ranks, fills their offsets and
lengths into the metadata, writes the manifest, and renames the folder. The rename is the moment from which the
checkpoint exists. Needs no torch.
"""

import errno
import json
import os
import shutil
import time
from pathlib import Path

from muster.checkpoint.format import durable_folders, layout
from muster.checkpoint.format.errors import CorruptShard, FlushError
from muster.checkpoint.store.flush.flush_part import FlushPart, describe_error, write_durably
from muster.checkpoint.store.flush.rank_file import RankFileNote, contiguous_bytes
from muster.checkpoint.store.memory.shards import Shard

PARTS_TIMEOUT_S = 120.0
"""Seconds that the flush leader waits for the parts of the other nodes."""

_POLL_S = 0.02


def publish(part: FlushPart, rank_0_shard: Shard, timeout_s: float = PARTS_TIMEOUT_S) -> Path:
    """Wait for every rank's note, write metadata and manifest, rename the folder.

    Args:
        part: the flush leader's part.
        rank_0_shard: the shard that holds the metadata.
        timeout_s: seconds that the other nodes may take.

    Returns:
        The final folder.

    Raises:
        FlushError: the flush failed or was superseded. The caller has to remove the temporary folder.
    """
    try:
        view = contiguous_bytes(rank_0_shard)
        world_size, metadata = layout.read_index(view).world_size, layout.read_durable_metadata(view)
        notes = _wait_for_notes(part, world_size, timeout_s)
        places = {number: (offset, length) for note in notes for number, offset, length in note.items}
        write_durably(part.temporary_folder / durable_folders.METADATA, layout.fill_placeholders(metadata, places))
        manifest = _manifest(part, notes)
        write_durably(part.temporary_folder / durable_folders.MANIFEST, manifest.dump())
        for note in notes:
            part.note_path(note.rank).unlink()
            if not note.items:
                (part.temporary_folder / durable_folders.rank_file_name(note.rank)).unlink()
        _sync_folder(part.temporary_folder)
        _rename_to_final(part, manifest)
    except (OSError, CorruptShard) as error:
        raise FlushError(describe_error(error, part.durable_folder)) from error
    _remove_leftovers(part)
    return part.final_folder


def remove_folder(temporary_folder: Path) -> None:
    """Remove a temporary folder with all its files, as far as possible."""
    shutil.rmtree(temporary_folder, ignore_errors=True)


def _wait_for_notes(part: FlushPart, world_size: int, timeout_s: float) -> list[RankFileNote]:
    deadline = time.monotonic() + timeout_s
    notes: dict[int, RankFileNote] = {}
    while True:
        part.raise_if_superseded()
        names = set(os.listdir(part.temporary_folder))
        for rank in range(world_size):
            if rank not in notes and part.note_path(rank).name in names:
                fields = json.loads(part.note_path(rank).read_bytes())
                notes[rank] = RankFileNote(**{**fields, "items": [tuple(row) for row in fields["items"]]})
        if len(notes) == world_size:
            return [notes[rank] for rank in range(world_size)]
        if part.failure_mark.name in names:
            raise FlushError(f"a node could not write its part of {part.version}: its own agent says why")
        if time.monotonic() > deadline:
            absent = [rank for rank in range(world_size) if rank not in notes]
            raise FlushError(f"ranks {absent} were not written to {part.durable_folder} within {timeout_s:.0f} s")
        part.superseded.wait(_POLL_S)


def _manifest(part: FlushPart, notes: list[RankFileNote]) -> durable_folders.Manifest:
    ranks = {
        str(note.rank): {
            "shard_digest": note.shard_digest,
            "file": durable_folders.rank_file_name(note.rank) if note.items else None,
            "file_bytes": note.file_bytes,
            "file_xxh3_128": note.file_digest,
        }
        for note in notes
    }
    version = part.version
    return durable_folders.Manifest(version.step, version.generation, len(notes), part.gang_id, part.reason, ranks)


def _rename_to_final(part: FlushPart, manifest: durable_folders.Manifest) -> None:
    try:
        part.temporary_folder.rename(part.final_folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        if not manifest.matches(part.final_folder):
            raise FlushError(
                f"{part.final_folder} is there already, and is not {part.version} of gang {part.gang_id} as it stands "
                "in memory: move it away, or name another durable_dir"
            ) from error
        # An earlier flush has written the same bytes of this version.
        shutil.rmtree(part.temporary_folder)
        return
    _sync_folder(part.durable_folder)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(part: FlushPart) -> None:
    """Remove the folders that earlier flushes of this gang left when their agents died."""
    for path in part.durable_folder.iterdir():
        parsed = durable_folders.parse_temporary_folder_name(path.name)
        if parsed is None:
            continue
        label, serial = parsed
        if label.gang == part.gang_id and label.version <= part.version and serial < part.serial:
            shutil.rmtree(path, ignore_errors=True)
