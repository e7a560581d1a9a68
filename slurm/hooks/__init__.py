"""What Slurm itself runs on a node, as root."""
