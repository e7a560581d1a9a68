"""The flush leader's part of a flush: complete the folder that all nodes have written, and give it its final name.

The flush leader is the node that writes rank 0's file. It waits for the notes of all ranks, fills their offsets and
lengths into the metadata, writes the manifest, and renames the folder. The rename is the moment from which the
checkpoint exists. Needs no torch.
"""

import json
import time
from contextlib import suppress

import xxhash

from muster.checkpoint.durable.newest import manifest_in
from muster.checkpoint.format import durable_folders, layout
from muster.checkpoint.format.errors import CorruptShard, FlushError
from muster.checkpoint.store.flush.flush_part import FAILURE_MARK, FlushPart, describe_error, note_name
from muster.checkpoint.store.flush.rank_file import RankFileNote

PARTS_TIMEOUT_S = 6 * 3600.0
"""Seconds for which the flush leader waits while it sees nothing change in the folder. The coordinator hears how many
bytes each node has written, and gives a flush up far earlier; this is for a gang that has lost its coordinator. Uploads
to a store of objects are not seen before they are complete."""

_MOST_NOTE_BYTES = 1 << 30
"""Far more than the note of a rank with a million items has."""


def publish(part: FlushPart, world_size: int, durable_metadata: bytes, timeout_s: float = PARTS_TIMEOUT_S) -> str:
    """Wait for every rank's note, write manifest and metadata, complete the folder.

    Args:
        part: the flush leader's part.
        world_size: the number of ranks that have written the version.
        durable_metadata: with placeholders, from rank 0's shard.
        timeout_s: seconds for which nothing may change in the folder.

    Returns:
        The name of the final folder.

    Raises:
        FlushError: the flush failed or was given up. The caller has to remove the working folder.
    """
    try:
        notes = _wait_for_notes(part, world_size, timeout_s)
        places = {number: (offset, length) for note in notes for number, offset, length in note.items}
        metadata = layout.fill_placeholders(durable_metadata, places)
        manifest = _manifest(part, notes, metadata)
        part.store.write(part.file(durable_folders.MANIFEST), manifest.dump())
        part.store.remove(*(part.file(note_name(note.rank)) for note in notes))
        empty = (durable_folders.rank_file_name(note.rank) for note in notes if not note.items)
        part.store.remove(*map(part.file, empty))
        part.raise_if_given_up()
        # Last: in a store of objects this makes it a checkpoint.
        part.store.write(part.file(durable_folders.METADATA), metadata)
        _complete(part, manifest)
    except (OSError, CorruptShard) as error:
        raise FlushError(describe_error(error, part.store.where)) from error
    _remove_leftovers(part)
    return part.final_folder


def _wait_for_notes(part: FlushPart, world_size: int, timeout_s: float) -> list[RankFileNote]:
    before: dict[str, int] = {}
    deadline = time.monotonic() + timeout_s
    notes: dict[int, RankFileNote] = {}
    while True:
        part.raise_if_given_up()
        names = set(part.store.names(part.working_folder))
        for rank in range(world_size):
            if rank not in notes and note_name(rank) in names:
                fields = json.loads(part.store.read(part.file(note_name(rank)), _MOST_NOTE_BYTES))
                notes[rank] = RankFileNote(**{**fields, "items": [tuple(row) for row in fields["items"]]})
        if len(notes) == world_size:
            return [notes[rank] for rank in range(world_size)]
        if FAILURE_MARK in names:
            raise FlushError(f"a node could not write its part of {part.version}: its own agent says why")
        if time.monotonic() > deadline:
            sizes = {entry.name: entry.size for entry in part.store.entries(part.working_folder)}
            if sizes != before:
                before, deadline = sizes, time.monotonic() + timeout_s
                continue
            absent = [rank for rank in range(world_size) if rank not in notes]
            raise FlushError(f"of ranks {absent} nothing more came to {part.store.where} for {timeout_s:.0f} s")
        part.given_up.wait(part.store.poll_s)


def _manifest(part: FlushPart, notes: list[RankFileNote], metadata: bytes) -> durable_folders.Manifest:
    ranks = {
        str(note.rank): {
            "shard_digest": note.shard_digest,
            "file": durable_folders.rank_file_name(note.rank) if note.items else None,
            "file_bytes": note.file_bytes,
            "file_xxh3_128": note.file_digest,
            "data_bytes": note.data_bytes,
            "blocks_xxh3_128": note.blocks_digest,
        }
        for note in notes
    }
    version = part.version
    return durable_folders.Manifest(
        version.step,
        version.generation,
        len(notes),
        part.gang_id,
        part.reason,
        ranks,
        len(metadata),
        xxhash.xxh3_128_hexdigest(metadata),
        part.job,
    )


def _complete(part: FlushPart, manifest: durable_folders.Manifest) -> None:
    try:
        part.store.complete(part.working_folder, part.final_folder)
    except FileExistsError as error:
        if not manifest.matches(manifest_in(part.store, part.final_folder)):
            raise FlushError(
                f"{error.filename} is there already, and is not {part.version} of gang {part.gang_id} as it stands "
                "in memory: move it away, or name another durable_dir"
            ) from error
        # An earlier flush has written the same bytes of this version.
        part.store.remove_folder(part.working_folder)


def _remove_leftovers(part: FlushPart) -> None:
    """Remove the folders that earlier flushes of this gang left when their agents died, as far as possible."""
    with suppress(OSError):
        for name in part.store.names():
            parsed = part.store.parse_leftover(name)
            if parsed is None:
                continue
            label, serial = parsed
            is_own = label.gang == part.gang_id and label.version <= part.version and serial < part.serial
            if is_own and part.store.is_open(name, name):
                part.store.remove_folder(name)
