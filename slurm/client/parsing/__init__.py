"""Reads Slurm's output: records, JSON, host lists, error messages, batch scripts.

Pure. `backends` and `fake` import this folder.

May import: `fabric.model`, `fabric.sources`, `slurm.client`.
"""
