"""What a login node runs: the `muster` command.

This folder holds what every command needs: the shape of a command, the coordinator's client, the errors. The rooms:
`commands` (one command a file), `spec` (job.toml), `submission` (the sbatch script), `output` (tables, JSON, rank
logs), `local` (`muster run --local`). No daemon imports the launcher.
"""
