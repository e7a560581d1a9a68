"""What is decided in each phase of a gang: gathering, running, recovering; flush, stop, swap, growth, requeue, end.

`core.transitions` says which phase has which rules.

May import: `checkpoint.format`, `checkpoint.redundancy`, `daemon.coordinator.core.detection`,
`daemon.coordinator.core.recovery.growth`, `daemon.coordinator.core.recovery.losses`, `daemon.coordinator.core.state`,
`daemon.coordinator.core.turn`, `fabric.cost`, `fabric.model`, `fabric.placement.maps`.
"""
