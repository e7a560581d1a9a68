"""Where a fabric comes from: Slurm's topology, a site's file, generators for plans and tests.

Pure: callers read the files and ask Slurm. What can't be understood becomes a flat network and a warning.
"""
