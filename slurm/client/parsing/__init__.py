"""Reads Slurm's output: records, JSON, host lists, error messages, batch scripts.

Pure. `backends` and `fake` import this folder.
"""
