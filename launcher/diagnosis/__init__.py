"""`muster diagnose`: is each group where the job wanted it, which link is slow, how fast are steps, and what to change.

What was measured comes from the coordinator, the network from Slurm, the prediction from `fabric/estimate`. All but
`show` is pure. `launcher/commands` imports this room.

May import: `daemon.host`, `fabric.cost`, `fabric.estimate`, `fabric.groups`, `fabric.model`, `fabric.placement`,
`fabric.sources`, `launcher`, `launcher.output`, `launcher.plan`, `launcher.spec`, `slurm.client`,
`slurm.client.backends`, `slurm.client.parsing`.
"""
