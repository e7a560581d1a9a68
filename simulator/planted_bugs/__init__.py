"""Planted bugs, each of which the simulator must find: the simulator's own test."""
