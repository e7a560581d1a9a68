"""How the nodes of a generation commit a version: the leader's bookkeeping (pure), and the messages around it.

Promises that a version is committed only when every shard of it is in all its places. Never imports torch.
`checkpoint.store` and the simulator import it.

May import: `checkpoint.format`, `checkpoint.redundancy`, `checkpoint.store.memory`, `checkpoint.store.replication`,
`checkpoint.store.streams`, `fabric.cost`.
"""
