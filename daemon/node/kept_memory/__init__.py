"""Memory checkpoints that a node keeps while their job is requeued.

`retention` decides and is pure; the simulator runs it too. `musterd` imports this room.
"""
