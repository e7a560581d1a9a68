"""The two real Slurm clients, and `open`, which chooses one.

Imports `slurm.client` and `parsing`. Programs import `open`, or `commands` where pyslurm makes no sense.
"""
