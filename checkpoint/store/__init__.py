"""The memory checkpoints of one node, inside `muster-agent`: one service above seven rooms.

`checkpoint_service` serves the ranks and the other agents, `rank_sockets` speaks to ranks, `rank_snapshots` takes what
they have filled, `kept_for_others` takes the shards of other nodes. Never imports torch. The agent imports it.

May import: `checkpoint.durable`, `checkpoint.format`, `checkpoint.redundancy`, `checkpoint.store.commit`,
`checkpoint.store.flush`, `checkpoint.store.memory`, `checkpoint.store.parity`, `checkpoint.store.replication`,
`checkpoint.store.restore`, `checkpoint.store.streams`, `daemon.host`.
"""
