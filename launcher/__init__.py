"""What a login node runs: spec, placement, the sbatch script, the muster command."""
