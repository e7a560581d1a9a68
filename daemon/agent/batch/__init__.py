"""`muster-agent batch`: the process that the batch script becomes. It starts srun and outlives it.

`startup` imports this room.

May import: `daemon.host`, `daemon.host.process`, `daemon.transport`, `slurm.client.parsing`.
"""
