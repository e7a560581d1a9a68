"""Sensors of the node daemon on a clock that the test sets. No program imports it.

May import: `daemon.node`, `daemon.node.sensors`.
"""
