"""Muster: launches distributed PyTorch training on Slurm and keeps it training."""

from __future__ import annotations

import os
from time import monotonic
from typing import Any

__version__ = "0.1.0"

# gRPC reads this once, when it is loaded. Others cause its errors as often as they like: a peer that leaves, a stranger
# whose TLS handshake names a server that is not there. What they mean to this process, it says itself. In a rank, gRPC
# may be the user's.
if "RANK" not in os.environ:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

_numbers: Any = None  # ReportedNumbers of this process, once it has said something
_due: dict[tuple[str, ...], float] = {}  # its `due`: a call that writes nothing looks no further


def log(step: int | None = None, *, total_steps: int | None = None, **numbers: Any) -> None:
    """Tell Muster how the training goes, for `muster status` and its pictures. For scripts without a Checkpoint, whose
    `step` takes the same numbers. Outside Muster nothing happens.

    It takes less than a microsecond, but for one call in half a second. A GPU is not waited for.

    Args:
        step: how many optimizer steps are finished.
        total_steps: the last step of the training.
        numbers: of this step: loss, gradient_norm, tokens (that this rank has read), lr, and others of the script,
            as numbers or tensors of one element; at most 32 names.
    """
    global _numbers, _due
    if total_steps is None and monotonic() < _due.get(tuple(numbers), 0.0):
        return
    if _numbers is None:
        if "MUSTER_AGENT_FD" not in os.environ:
            return
        from muster.checkpoint.training.rank_signals import reported_numbers

        _numbers = reported_numbers.of_process()
        if _numbers is None:
            return
        _due = _numbers.due
    if total_steps is not None:
        _numbers.set_total(total_steps)
    _numbers.note(step, numbers)
