"""What becomes of a checked job spec: the sbatch script, and the job that the coordinator knows.

The script is rendered purely: `--dry-run` prints exactly what is submitted. `commands` imports this folder.

May import: `checkpoint.durable`, `checkpoint.format`, `daemon.agent.start_checks`, `daemon.host`, `daemon.transport`,
`fabric.groups`, `fabric.placement`, `launcher`, `launcher.allocation`, `launcher.output`, `launcher.plan`,
`launcher.spec`, `slurm.client`, `slurm.client.backends`, `slurm.client.parsing`.
"""
