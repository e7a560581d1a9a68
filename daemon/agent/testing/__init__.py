"""A scripted coordinator, and real agents as processes of one machine: for tests and benchmarks.

No program imports this room.

May import: `daemon.host`, `daemon.transport`.
"""
