"""job.toml: its model, its checks, and its error messages.

Pure. `commands` and `submission` import this folder.

May import: `checkpoint.redundancy`, `daemon.host`, `daemon.transport`, `fabric.groups`, `fabric.model`, `launcher`,
`slurm.client`, `slurm.client.parsing`.
"""
