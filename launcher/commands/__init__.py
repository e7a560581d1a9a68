"""The commands of `muster`, one in each file.

May import: `checkpoint.durable`, `checkpoint.format`, `daemon.agent.batch`, `daemon.agent.start_checks`, `daemon.host`,
`daemon.preflight`, `daemon.transport`, `fabric.sources`, `launcher`, `launcher.allocation`, `launcher.diagnosis`,
`launcher.local`, `launcher.output`, `launcher.plan`, `launcher.policy`, `launcher.report`, `launcher.runs`,
`launcher.scripts`, `launcher.spec`, `launcher.submission`, `launcher.top`, `slurm.client`, `slurm.client.backends`,
`slurm.client.parsing`.
"""
