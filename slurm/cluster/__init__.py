"""The test cluster: containers with a real Slurm, their faults, and the jobs that tests run on them."""
