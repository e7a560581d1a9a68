"""A gang in one process, or with a process for each agent, for tests and benchmarks. It connects `checkpoint.training`
with `checkpoint.store`.

No program imports it.

May import: `checkpoint.durable`, `checkpoint.format`, `checkpoint.store`, `checkpoint.store.flush`,
`checkpoint.store.memory`, `checkpoint.store.replication`, `checkpoint.store.streams`, `checkpoint.training`,
`daemon.host`.
"""
