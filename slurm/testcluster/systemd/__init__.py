"""One host with systemd, on which Muster's units are tested. It uses parts of the test cluster, and is none of them.

May import: `slurm.testcluster`, `slurm.image`.
"""
