"""What a node must have for a job: its folders, its program, its script; and where the command has its ranks meet. Each
agent looks before it attaches, and `muster submit` looks at the login node.

`daemon/agent`, its `ranks` and `launcher/submission` may import it.

May import: `checkpoint.durable`, `checkpoint.format`, `daemon.host`, `daemon.host.process`.
"""
