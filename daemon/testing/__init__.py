"""What stands in for the other side of a daemon in tests and benchmarks: a scripted coordinator, real agents as
processes of one machine, credentials of users that a test chooses, a client that sends half messages, a sensor on a
clock that the test sets.

No program imports it, and no setting of a site selects it.

May import: `daemon.host`, `daemon.node`, `daemon.node.sensors`, `daemon.transport`.
"""
