"""The simulated cluster: Muster's processes around the real core, on the nodes, the network and the Slurm of
`environment`.

It promises: the same seed gives the same run. It imports no invariant: `observer` is the Protocol through which the
invariants are told. Faults, invariants and scenarios import this room.

May import: `checkpoint.format`, `checkpoint.redundancy`, `checkpoint.store`, `checkpoint.store.commit`,
`daemon.agent.failure_detector`, `daemon.agent.ranks`, `daemon.coordinator.core`, `daemon.coordinator.core.detection`,
`daemon.coordinator.core.recovery`, `daemon.coordinator.core.recovery.growth`, `daemon.coordinator.core.state`,
`daemon.coordinator.core.turn`, `daemon.coordinator.journal`, `daemon.coordinator.shell`, `daemon.coordinator.slurm`,
`daemon.node.kept_memory`, `daemon.transport`, `simulator.coverage`, `simulator.environment`, `slurm.client`,
`slurm.client.fake`, `slurm.client.parsing`.
"""
