"""The two real Slurm clients, and `open`, which chooses one of them.

This folder imports `slurm.client` and `parsing`. Programs import `open`. A program that never needs pyslurm imports
`commands`.

May import: `fabric.sources`, `slurm.client`, `slurm.client.parsing`.
"""
