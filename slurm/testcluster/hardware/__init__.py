"""What a node of the test cluster pretends to have, and the faults of it: GPUs, adapters, memory, slow processors.

`muster.slurm.testcluster` and unit tests import this folder.

May import: `slurm.image`.
"""
