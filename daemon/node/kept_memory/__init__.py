"""Memory checkpoints that a node keeps while their job is requeued.

`retention` decides and is pure; the simulator uses it too. `musterd` imports this room.

May import: `checkpoint.store.memory`, `daemon.host`.
"""
