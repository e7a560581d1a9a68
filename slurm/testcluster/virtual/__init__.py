"""Nodes of a test cluster that exist in Slurm's mind only, and their networks: as many as a site has.

May import: `slurm.client.parsing`, `slurm.testcluster`.
"""
