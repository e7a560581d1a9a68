"""`muster submit SCRIPT`: a user's own batch script goes to sbatch as it is, and what it launches is supervised.

The script, its options and its launch line are read without running anything; `queueing` puts all together. `commands`
imports this folder.

May import: `daemon.host`, `daemon.transport`, `launcher`, `launcher.runs`, `launcher.spec`, `launcher.submission`,
`slurm.client`, `slurm.client.backends`, `slurm.client.parsing`.
"""
