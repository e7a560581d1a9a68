"""Where a job shall run: what its groups ask of Slurm, what Slurm can give now, and which request is made.

`commands` imports this folder, and only where a job has groups that span nodes. All but `ask` is pure.

May import: `daemon.host`, `fabric.groups`, `fabric.model`, `fabric.sources`, `launcher`, `launcher.output`,
`launcher.spec`, `slurm.client`, `slurm.client.parsing`.
"""
