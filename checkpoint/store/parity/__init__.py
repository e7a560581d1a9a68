"""Parities: what a lost rank's shard is rebuilt from, where whole copies would need more memory than nodes have.

Inside the agent, without PyTorch; needs numpy. Each byte is verified when it comes, and when it is rebuilt.
`checkpoint.store.kept_for_others` alone imports this.

May import: `checkpoint.format`, `checkpoint.redundancy`, `checkpoint.store.flush`, `checkpoint.store.memory`,
`checkpoint.store.replication`, `checkpoint.store.restore`, `checkpoint.store.streams`, `daemon.host`.
"""
