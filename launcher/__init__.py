"""What a login node runs: the `muster` command.

This folder holds what all commands share: the type of a command, the coordinator client, the errors. Subfolders:
`commands` (one command in each file), `spec` (job.toml), `submission` (the sbatch script), `output` (tables, JSON, rank
logs), `local` (`muster run --local`), `top` (the live screen). No daemon imports the launcher.

May import: `daemon.host`, `daemon.host.process`, `daemon.transport`, `daemon.transport.calls`, `fabric.sources`,
`launcher.output`, `slurm.client`, `slurm.client.parsing`.
"""
