"""What a growth may bring that is not wanted: ranks that crash on the nodes that came, and nodes without ranks.

The rules of `core.recovery` import it.

May import: `daemon.coordinator.core.detection`, `daemon.coordinator.core.state`, `daemon.coordinator.core.turn`.
"""
