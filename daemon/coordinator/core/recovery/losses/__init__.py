"""What follows from a loss that is not finite, has a spike or does not fall: a record, a stop, a roll back.

The rules of `core.recovery` import it.

May import: `daemon.coordinator.core.detection`, `daemon.coordinator.core.losses`, `daemon.coordinator.core.state`,
`daemon.coordinator.core.turn`.
"""
