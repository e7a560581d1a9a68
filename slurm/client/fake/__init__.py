"""An in-memory Slurm cluster that follows rules measured on a real Slurm.

`muster run --local`, the simulator and tests use it.

May import: `fabric.sources`, `slurm.client`, `slurm.client.parsing`.
"""
