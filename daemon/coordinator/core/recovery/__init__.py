"""From node health to the next generation, or to the end: transitions, gathering, shared pool, restore, flush, stop,
requeue.

`core.core` imports it.

May import: `checkpoint.format`, `daemon.coordinator.core.detection`,
`daemon.coordinator.core.recovery.growth`, `daemon.coordinator.core.recovery.parity`, `daemon.coordinator.core.state`,
`daemon.coordinator.core.turn`, `fabric.cost`, `fabric.placement.maps`.
"""
