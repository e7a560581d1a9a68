"""The second copy of each shard: sending a shard to its buddy, receiving one, and the messages of both.

Promises that every byte is verified before a replica counts. Never imports torch. `checkpoint.store` and the agent
import it.

May import: `checkpoint.format`, `checkpoint.redundancy`, `checkpoint.store.memory`, `checkpoint.store.streams`,
`daemon.host`.
"""
