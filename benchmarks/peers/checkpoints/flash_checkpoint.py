"""DLRover's Flash Checkpoint: a program, run by the Python that has dlrover (see `calls.serve`).

The saver is a process beside the training, as dlrover-run starts it. A save copies the state into shared memory.
"""

from __future__ import annotations

import itertools
from typing import Any

import calls
from dlrover.python.common import multi_process
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer


def library(job: dict[str, Any]) -> calls.Calls:
    """The checkpointer with the state of the job."""
    # Sockets of a run that was killed would be taken for those of this one.
    multi_process.SOCKET_TMP_DIR = f"{job['memory_folder']}/"
    state, steps = calls.state_of(job), itertools.count(1)
    checkpointer = DdpCheckpointer(job["folder"])

    def save() -> None:
        step = next(steps)
        checkpointer.save_checkpoint(step, dict(state), storage_type=StorageType.MEMORY)
        kept = checkpointer._engine._shm_handler.get_checkpoint_config(None)
        if kept is None or kept.step != step:
            raise RuntimeError(f"step {step} was not kept")

    return {"save": save, "close": checkpointer._engine._shm_handler.unlink}


if __name__ == "__main__":
    calls.serve(library)
