"""Whether this process may be forked into a rank.

After a process has run an OpenMP region, opened an accelerator or made a CUDA context, its forked children hang or fail
later, far from the cause. Uses the standard library only.
"""

from __future__ import annotations

import os
import sys

from muster.daemon.host import process_tree

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/habanalabs", "/dev/infiniband/")


def reason_not_to_fork() -> str:
    """Why this process must not be forked into a rank; empty: it may."""
    if (device := _open_device()) is not None:
        return f"{device} is open in it"
    if _cuda_initialised():
        return "it holds a CUDA context"
    if (threads := process_tree.thread_count()) > 1:
        return f"it has {threads} threads"
    return ""


def _open_device() -> str | None:
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue
        if target.startswith(_DEVICES):
            return target
    return None


def _cuda_initialised() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "cuda") and bool(torch.cuda.is_initialized())
