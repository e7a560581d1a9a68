"""The Slurm client: one Protocol (`types`), its errors and states.

Its rooms: `backends` (Slurm's commands, pyslurm), `parsing` (what Slurm prints), `fake` (a cluster in memory). They
import this folder, and this folder imports none of them.
"""
