"""Memory checkpoints: the library that a training loop uses, and the store inside its agent.

    sampler = muster.checkpoint.ShardedSampler(data, batch_size=8)
    checkpoint = muster.checkpoint.Checkpoint(model=ddp, optimizer=optimizer, sampler=sampler)
    done = checkpoint.restore(warmup=lambda: loss_of(first_batch).backward())
    ...
    if not checkpoint.step(done): break

Importing this package needs neither torch nor numpy. Only the name `Checkpoint` imports torch, and `ShardedSampler`
numpy.

May import: `checkpoint.data`, `checkpoint.format`, `checkpoint.training`.
"""

from typing import TYPE_CHECKING, Any

from muster.checkpoint.format.errors import CheckpointError, FlushError, RestoreError

if TYPE_CHECKING:
    from muster.checkpoint.data.sharded_sampler import ShardedSampler
    from muster.checkpoint.training.loop import Checkpoint

__all__ = ["Checkpoint", "CheckpointError", "FlushError", "RestoreError", "ShardedSampler"]


def __getattr__(name: str) -> Any:
    if name == "Checkpoint":
        from muster.checkpoint.training.loop import Checkpoint

        return Checkpoint
    if name == "ShardedSampler":
        from muster.checkpoint.data.sharded_sampler import ShardedSampler

        return ShardedSampler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
