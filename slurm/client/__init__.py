"""The Slurm client: the Protocol `Slurm` and its data (`types`), its errors, its states.

Subfolders: `backends` (the real clients: Slurm's commands and pyslurm), `parsing` (reads Slurm's output), `fake` (an
in-memory cluster). The subfolders import this folder. This folder imports none of them.

May import: `fabric.sources`.
"""
