"""Reads what Slurm prints: records, JSON, host lists, refusals, batch scripts.

Pure. `backends` and `fake` import it.
"""
