"""torchtitan's trainer with memory checkpoints: its own command line, and every step kept in memory.

    command = ["python3", "/shared/titan/train.py", "--module", "llama3", "--config", "llama3_debugmodel"]

torchtitan calls its checkpointer once before the loop and after each step. So Muster takes the checkpointer's place.
The data loader is kept for each rank, so the job goes on with as many ranks as it had. Written for torchtitan 0.3, and
not run by Muster's tests.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger

from muster.checkpoint import Checkpoint


class MusterCheckpointer:
    """What torchtitan's trainer calls, by memory checkpoints.

    Args:
        trainer: is built and has not begun.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        # The containers join the states of their parts under other names; Muster keeps the parts as torch has them.
        self.checkpoint = Checkpoint(
            **numbered("model", trainer.model_parts),
            **numbered("optimizer", trainer.optimizers),
            **numbered("scheduler", trainer.lr_schedulers),
            loader=trainer.dataloader,
            progress=trainer,
        )

    def load(self, step: int = -1) -> bool:
        """Load the newest kept step; torchtitan's `step` chooses among its own checkpoints."""
        return self.checkpoint.restore() > 0

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Keep the step. A planned stop ends the loop."""
        if not self.checkpoint.step(curr_step, final=last_step):
            self.trainer.should_continue_training = lambda: False
        return True

    def maybe_wait_for_staging(self) -> None:
        """A snapshot is copied before `save` returns: there is nothing to wait for."""

    def maybe_wait_for_saving(self) -> None:
        """Agents replicate by themselves."""

    def close(self) -> None:
        """Close the connection to the agent, which keeps the state."""
        self.checkpoint.close()


def numbered(name: str, parts: Any) -> dict[str, Any]:
    """Parts under the names name0, name1, ..."""
    return {f"{name}{number}": part for number, part in enumerate(parts)}


def main() -> int:
    """Train, as torchtitan's own train.py does."""
    init_logger()
    trainer = ConfigManager().parse_args().build()
    trainer.checkpointer.close()
    trainer.checkpointer = MusterCheckpointer(trainer)
    try:
        trainer.train()
    finally:
        trainer.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
