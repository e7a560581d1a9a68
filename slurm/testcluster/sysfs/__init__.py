"""The hardware that a node of the test cluster pretends to have, as files and links in the place of /sys.

`muster.slurm.testcluster` and unit tests import this folder.

May import: `slurm.image`.
"""
