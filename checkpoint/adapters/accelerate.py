"""Checkpoints of what Hugging Face's Accelerate has prepared.

    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    checkpoint = prepared_checkpoint(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)

Don't prepare a loader with a ShardedSampler: Accelerate would divide the samples a second time. Tell the accumulation
to the Accelerator and to the sampler, and call `checkpoint.step` when `accelerator.sync_gradients` is set.
"""

from typing import Any

from muster.checkpoint.training.loop import Checkpoint


def prepared_checkpoint(**states: Any) -> Checkpoint:
    """A Checkpoint of objects that Accelerate has prepared. Takes what `Checkpoint` takes.

    The gradient scaler that Accelerate makes for 16 bits is kept as "scaler".
    """
    scalers = [scaler for value in states.values() if (scaler := scaler_of(value)) is not None]
    of_accelerate = {"scaler": scalers[0]} if scalers else {}  # all optimizers share it
    return Checkpoint(**of_accelerate | {name: unwrapped(value) for name, value in states.items()})


def scaler_of(value: Any) -> Any:
    """The gradient scaler that a prepared optimizer uses; None: it uses none, or this is no prepared optimizer."""
    from accelerate.optimizer import AcceleratedOptimizer

    return value.scaler if isinstance(value, AcceleratedOptimizer) else None


def unwrapped(value: Any) -> Any:
    """What Accelerate has wrapped: the optimizer of torch, or the scheduler. Any other object itself.

    A wrapped optimizer loads its state on the device that Accelerate wants. The wrapped one's states belong to its
    parameters, and a wrapped scheduler is no scheduler of torch, so that it would count as one rank's own.
    """
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    if isinstance(value, AcceleratedOptimizer):
        return value.optimizer
    return value.scheduler if isinstance(value, AcceleratedScheduler) else value
