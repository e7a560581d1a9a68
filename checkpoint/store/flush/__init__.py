"""Writing a version from memory to a durable folder, by all nodes together.

Promises that a folder has its final name only once it is complete. Never imports torch. `checkpoint.store` imports it.

May import: `checkpoint.durable`, `checkpoint.format`, `checkpoint.redundancy`, `checkpoint.store.memory`,
`daemon.host`.
"""
