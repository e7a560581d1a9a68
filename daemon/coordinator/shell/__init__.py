"""All that acts on decisions: one event loop, orders to agents, probes, agents' streams, subscribers of the journal.

Imports `core`, `journal`, `slurm`, and `leadership` for its clock. `services` and `server` import it.
"""
