"""A coordinator on loopback with scripted agents, for tests and benchmarks.

No program imports it.
"""
