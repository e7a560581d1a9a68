"""`muster plan`: from job.toml to an estimate, and the estimate as a screen or as JSON.

What job.toml does not say is taken from defaults, and each default is named. What a job asks Slurm for is decided in
`launcher/allocation`. `launcher/commands` imports this room.
"""
