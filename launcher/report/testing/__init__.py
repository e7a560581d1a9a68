"""A made-up job with faults, of any size, for tests, benchmarks and the pictures of the documentation.

May import: `daemon.coordinator.core.state`, `daemon.coordinator.journal`, `daemon.host`.
"""
