"""The site's policy: the action for each hardware signal, the circuit breaker's limits, the shared pool.

Imports `core.state`. `services` and `server` import it.
"""
