"""Muster: launches distributed PyTorch training on Slurm and keeps it training."""

import os

__version__ = "0.1.0"

# gRPC reads this once, when it is loaded: else every peer that leaves in good order puts a line into our logs.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
