"""From evidence to node health: failure detector, probe results, attribution, hangs, outages, circuit breaker.

`core.recovery` imports it.

May import: `daemon.coordinator.core.state`, `daemon.coordinator.core.turn`, `daemon.transport`, `fabric.cost`,
`fabric.estimate`.
"""
