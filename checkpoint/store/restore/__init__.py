"""What a generation starts from: the shards of its ranks, or parts of other ranks' shards, from all memory of the gang.

Promises that no byte is seen by a rank before it is verified. Never imports torch. `checkpoint.store` imports it.

May import: `checkpoint.format`, `checkpoint.redundancy`, `checkpoint.store.memory`, `checkpoint.store.replication`,
`checkpoint.store.streams`, `daemon.host`.
"""
