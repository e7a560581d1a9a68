"""The commands of `muster`, one in each file.

May import: `checkpoint.durable`, `daemon.agent.start_checks`, `daemon.host`, `daemon.preflight`, `daemon.transport`,
`fabric.sources`, `launcher`, `launcher.allocation`, `launcher.diagnosis`, `launcher.local`, `launcher.output`,
`launcher.plan`, `launcher.policy`, `launcher.report`, `launcher.spec`, `launcher.submission`, `launcher.top`,
`slurm.client`, `slurm.client.backends`, `slurm.client.parsing`.
"""
