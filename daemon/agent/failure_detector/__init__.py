"""What one agent knows of the other agents: links, pings, silence, accusations, self-fencing.

`silence_rules` is pure; the simulator uses it too. The agent imports this room.

May import: `checkpoint.store`, `daemon.host`, `daemon.transport`, `daemon.transport.calls`.
"""
