"""The coordinator's side of Slurm: owed calls, look-ups, the watch on jobs and nodes, the roster of all nodes.

Imports `core.state` and `slurm.client`. `shell` and `services` import it.
"""
