"""A coordinator on loopback with scripted agents, for tests and benchmarks.

No program imports it.

May import: `daemon.coordinator`, `daemon.coordinator.core.state`, `daemon.coordinator.journal`, `daemon.host`,
`daemon.transport`, `slurm.client.fake`, `slurm.client.parsing`.
"""
