"""`make chaos`: random faults against two training jobs on a real Slurm, and what must hold at the end.

`__main__` is the program. Only `make` and tests use this folder.

May import: `slurm.image`, `slurm.testcluster`.
"""
