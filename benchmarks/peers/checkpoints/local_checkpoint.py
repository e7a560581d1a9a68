"""NVRx's local checkpoints: a program, run by the Python that has nvidia-resiliency-ext (see `calls.serve`).

Its own wrapper of a state takes tensors of CUDA only, and its asynchronous save waits for CUDA. So the state is wrapped
here, with the interface that it documents for that, and saved while the training waits, to memory (tmpfs).
"""

from __future__ import annotations

import itertools
import shutil
from typing import Any

import calls
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager


class HostStateDict(BasicTensorAwareStateDict):
    """A state whose tensors are in host memory already."""

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.state_dict = state_dict
        self._is_hollow = False


def library(job: dict[str, Any]) -> calls.Calls:
    """The manager with the state of the job."""
    state, steps = calls.state_of(job), itertools.count(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    manager = LocalCheckpointManager(job["memory_folder"])
    return {
        "save": lambda: manager.save(HostStateDict(dict(state)), next(steps), is_async=False),
        "close": lambda: shutil.rmtree(job["memory_folder"]),
    }


if __name__ == "__main__":
    calls.serve(library)
