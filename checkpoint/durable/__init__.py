"""Where durable checkpoints are: a folder of a POSIX file system, or the objects of a store that fsspec reaches.

Promises one interface, `durable_store.DurableStore`, to those that write (the flush), remove (retention) and read
(restore). Never imports torch. `checkpoint.store`, `checkpoint.training`, the agent and the launcher import it.

May import: `checkpoint.format`, `daemon.host`.
"""
