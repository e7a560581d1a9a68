"""The site's policy: the action for each hardware signal, the circuit breaker's limits, the shared pool, hooks.

`services` and `server` import it.

May import: `daemon.coordinator.core.state`, `daemon.host`.
"""
