"""Reads NVIDIA GPUs through NVIDIA's management library, in a process of its own.

What the readings mean is not decided here: `muster.daemon.node.sensors` does that. Only that folder imports this one.

May import: `daemon.host`.
"""
