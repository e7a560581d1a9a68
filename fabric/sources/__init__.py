"""Where a fabric comes from: Slurm's topology, or a site's file.

Pure: callers read the files and ask Slurm. What can't be understood becomes a flat network and a warning.

May import: `fabric.model`.
"""
