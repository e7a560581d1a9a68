"""The memory checkpoints of one node, inside `muster-agent`: one service above six rooms.

`checkpoint_service` serves the ranks and the other agents, `rank_sockets` speaks to ranks. Never imports torch.
The agent imports it.

May import: `checkpoint.durable`, `checkpoint.format`, `checkpoint.store.commit`, `checkpoint.store.flush`,
`checkpoint.store.memory`, `checkpoint.store.parity`, `checkpoint.store.replication`, `checkpoint.store.restore`,
`checkpoint.store.streams`, `daemon.host`.
"""
