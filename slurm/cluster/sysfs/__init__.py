"""The hardware that a node of the test cluster pretends to have, as files and links in the place of /sys.

Imports nothing of Muster but `muster.slurm.image`. `muster.slurm.cluster` and unit tests import this folder.
"""
