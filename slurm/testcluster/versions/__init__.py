"""An earlier version of Muster on a test cluster, beside this one: its wheel, and the replacement of files.

May import: `slurm.testcluster`, `slurm.image`.
"""
