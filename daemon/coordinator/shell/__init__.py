"""All that acts on decisions: one event loop, orders to agents, probes, streams, followers of the journal.

Imports `core`, `journal`, `slurm`. `services` and `server` import it.
"""
