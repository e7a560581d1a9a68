"""`muster plan`: from job.toml to an estimate, and the estimate as a screen or as JSON.

What job.toml does not say is taken from defaults, and each default is named. What a job asks Slurm for is decided in
`launcher/allocation`. `launcher/commands` imports this room.

May import: `checkpoint.redundancy`, `daemon.host`, `fabric.cost`, `fabric.estimate`, `fabric.groups`, `fabric.model`,
`fabric.placement`, `fabric.placement.maps`, `fabric.sources`, `launcher`, `launcher.allocation`, `launcher.output`,
`launcher.spec`, `slurm.client`, `slurm.client.backends`, `slurm.client.parsing`.
"""
