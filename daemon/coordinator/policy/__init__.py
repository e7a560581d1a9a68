"""The site's policy: the action for each hardware signal, the circuit breaker's limits, the shared pool,
losses, hooks.

`services` and `server` import it.

May import: `daemon.coordinator.core.losses`, `daemon.coordinator.core.state`, `daemon.host`, `daemon.transport`.
"""
