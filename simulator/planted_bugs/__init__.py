"""Deliberate bugs, as changes of a module's text. They test the simulator: its invariants must find each of them."""
