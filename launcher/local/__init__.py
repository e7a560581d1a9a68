"""`muster run --local`: a whole small cluster as processes of one workstation, without Slurm."""
