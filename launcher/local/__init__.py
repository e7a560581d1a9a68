"""`muster run --local`: a small cluster, made of processes on one workstation, without Slurm.

May import: `daemon.host`, `daemon.host.process`, `daemon.transport`, `launcher`, `launcher.output`,
`slurm.client`.
"""
