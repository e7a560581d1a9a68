"""Everything Slurm: the client, the container image and the test cluster.

May import: nothing.
"""
