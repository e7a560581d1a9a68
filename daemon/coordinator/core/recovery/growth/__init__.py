"""Nodes beyond those of the job: the shared pool, a growth that is undone, nodes that are left over.

The rules of `core.recovery` import it.

May import: `daemon.coordinator.core.detection`, `daemon.coordinator.core.state`, `daemon.coordinator.core.turn`.
"""
