"""Muster: launches distributed PyTorch training on Slurm and keeps it training."""

import os

__version__ = "0.1.0"

# gRPC reads this once, when it is loaded. Others cause its errors as often as they like: a peer that leaves, a stranger
# whose TLS handshake names a server that is not there. What they mean to this process, it says itself. In a rank, gRPC
# may be the user's.
if "RANK" not in os.environ:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
