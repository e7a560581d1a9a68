"""Programs that Slurm itself runs on a node, as root.

May import: `daemon.host`.
"""
