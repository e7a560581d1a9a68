"""Writes one rank's file of a flush: verified, digested and written in one pass over the shard's bytes.

One thread reads the bytes of a piece twice in a row, while they are in the processor's cache: its digest is compared,
and the digest of the file goes on. Another one writes them meanwhile.
"""

from collections.abc import Callable
from dataclasses import dataclass

from muster.checkpoint.durable.durable_store import DurableStore
from muster.checkpoint.store.flush.rank_source import RankSource
from muster.checkpoint.store.flush.written_bytes import WrittenBytes
from muster.checkpoint.store.flush.written_file import WrittenFile


@dataclass(frozen=True)
class RankFileNote:
    """What a rank's file holds. `items`: (number, offset, length) of each published item in the file.

    `data_bytes`: size of the items; the digests of their blocks follow. `blocks_digest`: the digest of these digests.
    """

    rank: int
    world_size: int
    shard_digest: str
    file_bytes: int
    file_digest: str
    data_bytes: int
    blocks_digest: str
    items: list[tuple[int, int, int]]


def write_rank_file(
    store: DurableStore, name: str, source: RankSource, raise_if_given_up: Callable[[], None], counted: WrittenBytes
) -> RankFileNote:
    """Write the published items of a shard to the file `name`. The bytes are durable when this returns.

    Args:
        raise_if_given_up: called between parts; whatever it raises ends the writing.
        counted: counts what is written.

    Raises:
        CorruptShard: some byte of the shard has changed, published or not.
        OSError: the file can't be written.
    """
    source.begin(counted)
    with WrittenFile(store.create(name), counted) as file:
        source.write_to(file, raise_if_given_up)
        file.finish()
    source.end()
    return RankFileNote(
        source.rank,
        source.world_size,
        source.digest.hex(),
        file.size,
        file.digest,
        file.data_bytes,
        file.blocks_digest,
        source.items,
    )
