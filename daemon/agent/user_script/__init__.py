"""What happens where a user's own batch script calls srun: `muster-agent shell`, `muster-agent srun`.

`daemon/agent/__main__.py` starts them. docs/SCRIPTS.md says what they do to a script.
May import: `daemon.agent.batch`, `daemon.agent.launch`, `daemon.agent.ranks`, `daemon.agent.start_checks`,
`daemon.host`, `daemon.host.process`, `daemon.transport`, `slurm.client`, `slurm.client.parsing`.
"""
