"""All that acts on decisions: one event loop, orders to agents, probes, agents' streams, subscribers of the journal.

`services` and `server` import it.

May import: `checkpoint.redundancy`, `daemon.coordinator.core`, `daemon.coordinator.core.state`,
`daemon.coordinator.core.turn`, `daemon.coordinator.journal`, `daemon.coordinator.leadership`,
`daemon.coordinator.slurm`, `daemon.host`, `daemon.host.process`, `daemon.transport`, `slurm.client`.
"""
