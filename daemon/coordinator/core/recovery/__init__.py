"""From node health to the next generation, or to the end: transitions, gathering, shared pool, restore, flush, stop,
requeue.

`core.core` imports it.

May import: `checkpoint.format`, `checkpoint.redundancy`, `daemon.coordinator.core.detection`,
`daemon.coordinator.core.recovery.growth`, `daemon.coordinator.core.recovery.restore`, `daemon.coordinator.core.state`,
`daemon.coordinator.core.turn`, `fabric.cost`, `fabric.placement.maps`.
"""
