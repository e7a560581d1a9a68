"""Parities: what a lost rank's shard is rebuilt from, where whole copies would need more memory than nodes have.

Inside the agent, without PyTorch; needs numpy. Each byte is verified when it comes, and when it is rebuilt. The
checkpoint service and the commit protocol import this.

May import: `checkpoint.format`, `checkpoint.store.flush`, `checkpoint.store.memory`, `checkpoint.store.replication`,
`checkpoint.store.restore`, `checkpoint.store.streams`, `daemon.host`.
"""
