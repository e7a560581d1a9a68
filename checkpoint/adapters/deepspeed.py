"""Checkpoints of what DeepSpeed's engine trains, with ZeRO stages 0, 1 and 2.

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    checkpoint = engine_checkpoint(engine, sampler=sampler)
    done = checkpoint.restore()
    ...
    engine.step()
    checkpoint.step(done)  # after the last engine.step() of an accumulation: it has made a step of the optimizer

`restore` needs no warmup, for DeepSpeed's buckets do not change. ZeRO's partitions differ from rank to rank, and are
copied as tensors. Only the same number of ranks can go on from them.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training.loop import Checkpoint

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_PARTITIONED = "engine.partition.*"


def engine_checkpoint(engine: Any, differs_in: Mapping[str, Any] | None = None, **options: Any) -> Checkpoint:
    """A Checkpoint of an engine's model, optimizer, scheduler and counters.

    Args:
        engine: what `deepspeed.initialize` has returned.
        differs_in, options: as `Checkpoint` takes them; more states by name, such as a sampler.

    Raises:
        CheckpointError: the engine's optimizer is none of torch's and none of ZeRO stage 1 or 2.
    """
    states: dict[str, Any] = {"model": engine.module}
    if isinstance(engine.optimizer, torch.optim.Optimizer):
        states["optimizer"] = engine.optimizer
        states["engine"] = _EngineState(engine)
    elif hasattr(engine.optimizer, "single_partition_of_fp32_groups"):
        states["engine"] = _ZeroState(engine)
        # In all ranks: those of other tensor-parallel ranks and stages differ, too.
        differs_in = {_PARTITIONED: None, **(differs_in or {})}
    else:
        kind = type(engine.optimizer).__name__
        raise CheckpointError(f"the optimizer is a {kind}: ZeRO stages 0 (without 16 bits), 1 and 2 can be kept")
    if engine.lr_scheduler is not None:
        states["scheduler"] = engine.lr_scheduler
    return Checkpoint(**{**states, **options}, differs_in=differs_in)


class _EngineState:
    """The engine's counters. One state for all ranks, as `finish_steps` says."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def finish_steps(self, n: int) -> None:
        """The engine counts by itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"counters": {name: getattr(self._engine, name) for name in _COUNTERS}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["counters"].items():
            setattr(self._engine, name, value)


class _ZeroState(_EngineState):
    """The counters, and this rank's part of ZeRO's optimizer: weights of 32 bits, and the inner optimizer's states."""

    @property
    def _zero(self) -> Any:
        return self._engine.optimizer

    def state_dict(self) -> dict[str, Any]:
        inner = self._zero.optimizer.state_dict()
        weights = [weights.detach() for weights in self._zero.single_partition_of_fp32_groups]
        groups = [{key: value for key, value in group.items() if key != "params"} for group in inner["param_groups"]]
        return {
            **super().state_dict(),
            "partition": {"weights": weights, "states": inner["state"]},
            "groups": groups,
            "scaler": dict(vars(self._zero.loss_scaler)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        vars(self._zero.loss_scaler).update(state["scaler"])
        inner, partition = self._zero.optimizer, state["partition"]
        for group, kept in zip(inner.param_groups, state["groups"], strict=True):
            group.update(kept)
        present = inner.state_dict()
        # In place: DeepSpeed has views of these tensors.
        _copy(self._zero.single_partition_of_fp32_groups, partition["weights"])
        if present["state"]:
            _copy(present["state"], partition["states"])
        elif partition["states"]:
            inner.load_state_dict({**present, "state": copy.deepcopy(partition["states"])})


def _copy(present: Any, kept: Any) -> None:
    """Copy all tensors of a state into a present one of the same structure, and put its other values there."""
    for key, value in present.items() if isinstance(present, dict) else enumerate(present):
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.copy_(kept[key])
        elif isinstance(value, dict | list):
            _copy(value, kept[key])
        else:
            present[key] = kept[key]
