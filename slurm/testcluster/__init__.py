"""The test cluster: containers with a real Slurm, their faults, and the jobs that tests run on them.

May import: `slurm.client.parsing`, `slurm.image`, `slurm.testcluster.hardware`.
"""
