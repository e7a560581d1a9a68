"""The bytes of a shard: its footer, its index and its placeholders. Bytes are no shard, or every offset lies inside."""

from muster.checkpoint.format import layout
from muster.checkpoint.format.errors import CorruptShard
from muster.checkpoint.store.memory.pieces import digest_pieces, pieces_cover


def check(data: bytes) -> None:
    """`data` as a whole shard."""
    shard = memoryview(data)
    try:
        footer = layout.read_footer(shard)
    except CorruptShard:
        return
    assert footer.objects_offset <= footer.header_offset <= len(data)
    assert pieces_cover(len(data), digest_pieces(shard))
    assert len(layout.read_leaf_directory(shard)) == footer.directory_bytes
    metadata = layout.read_durable_metadata(shard)
    assert len(metadata) == footer.metadata_bytes
    _check_index(shard, metadata)


def _check_index(shard: memoryview, metadata: bytes) -> None:
    try:
        index = layout.read_index(shard)
        assert layout.ShardIndex.load(index.dump()) == index
        for item in index.published:
            assert len(layout.published_bytes(shard, item)) <= len(shard)
        places = {item.number: (item.offset, item.length or 0) for item in index.published}
        assert len(layout.fill_placeholders(metadata, places)) == len(metadata)
    except CorruptShard:
        pass
