"""The gRPC services: messages are converted into events, state is converted into views.

`server` imports it.

May import: `checkpoint.redundancy`, `daemon.coordinator.core`, `daemon.coordinator.core.detection`,
`daemon.coordinator.core.losses`, `daemon.coordinator.core.recovery`, `daemon.coordinator.core.recovery.growth`,
`daemon.coordinator.core.state`, `daemon.coordinator.core.turn`, `daemon.coordinator.journal`,
`daemon.coordinator.policy`, `daemon.coordinator.shell`, `daemon.coordinator.slurm`,
`daemon.coordinator.view_parts`, `daemon.host`, `daemon.transport`,
`daemon.transport.calls`, `fabric.groups`, `fabric.model`, `fabric.placement`, `fabric.sources`, `slurm.client`.
"""
