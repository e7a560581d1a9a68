"""From node health to the next generation, or to the end: transitions, gathering, shared pool, restore, flush, stop,
requeue.

Imports `core.state` and `core.detection`. `core.core` imports it.
"""
