"""What stands in for the other side of a daemon in tests and benchmarks: a scripted coordinator, real agents as
processes of one machine, a coordinator on loopback with scripted agents, credentials of users that a test chooses, a
client that sends half messages, a sensor on a clock that the test sets.

No program imports it, and no setting of a site selects it.

May import: `daemon.coordinator`, `daemon.coordinator.core.state`, `daemon.coordinator.journal`, `daemon.host`,
`daemon.node`, `daemon.node.sensors`, `daemon.transport`, `slurm.client.fake`, `slurm.client.parsing`.
"""
