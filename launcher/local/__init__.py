"""`muster run --local`: a small cluster, made of processes on one workstation, without Slurm."""
