"""From evidence to node health: failure detector, rounds of probes, fencing, hardware signals, attribution, hangs,
stragglers, outages, circuit breaker.

`core.recovery` imports it.

May import: `daemon.coordinator.core.state`, `daemon.coordinator.core.turn`, `daemon.transport`, `fabric.cost`,
`fabric.estimate`.
"""
