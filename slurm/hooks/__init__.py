"""Programs that Slurm itself runs on a node, as root."""
