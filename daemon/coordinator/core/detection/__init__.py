"""From evidence to node health: failure detector, probe results, attribution, hangs, outages, circuit breaker.

Imports `core.state`. `core.recovery` imports it.
"""
