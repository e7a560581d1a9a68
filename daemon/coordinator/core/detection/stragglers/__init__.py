"""From step times to stragglers: the evidence that a rank is slow, and one finding for each node.

`core.recovery` imports it.

May import: `daemon.coordinator.core.state`, `daemon.coordinator.core.turn`.
"""
