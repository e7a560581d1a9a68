"""Reads Slurm's output: records, JSON, host lists, error messages, batch scripts, topologies.

Pure, except that `site_fabric` reads the site's own file of its network. `backends` and `fake` import this folder.

May import: `fabric.model`, `fabric.sources`, `slurm.client`.
"""
