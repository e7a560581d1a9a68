"""What users and operators request of gangs and nodes: swaps and drains.

A request is carried out by the rules of `core.recovery`, which this folder imports. `core.core` and the services import
it.

May import: `daemon.coordinator.core.detection`, `daemon.coordinator.core.recovery`, `daemon.coordinator.core.state`,
`daemon.coordinator.core.turn`.
"""
