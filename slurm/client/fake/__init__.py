"""A Slurm cluster in memory, with the rules measured on a real one.

For `muster run --local`, the simulator and tests.
"""
