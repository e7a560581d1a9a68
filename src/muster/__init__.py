"""Muster: launches distributed PyTorch training on Slurm and keeps it training."""
