"""Deliberate bugs, each in one function. They test the simulator: its invariants must find each of them.

May import: `simulator`, `simulator.invariants`.
"""
