"""One node's shards in memory: sealed memfds, the slots of each rank, pieces and their digests, the shard store.

Promises that a shard's bytes stay in place for as long as somebody holds the shard. Never imports torch. All other
rooms of `checkpoint.store` import it, and so do the agent and `musterd`.

May import: `checkpoint.format`, `checkpoint.redundancy`, `daemon.host.process`.
"""
