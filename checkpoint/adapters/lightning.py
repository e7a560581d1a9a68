"""A callback for PyTorch Lightning's Trainer: it keeps every step, and restores the newest one when training starts.

    sampler = ShardedSampler(data, batch_size=8, accumulation=2)
    loader = DataLoader(data, batch_sampler=sampler, generator=torch.Generator())
    trainer = Trainer(callbacks=[MusterCallback(sampler=sampler)], use_distributed_sampler=False, ...)
    trainer.fit(module, loader)

Lightning's own loops go on where they were: epochs, batches, schedulers, and validation.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from muster.checkpoint.training.loop import Checkpoint

_LOADERS = "combined_loader"
"""Where Lightning puts the states of loaders."""


class MusterCallback(Callback):  # type: ignore[misc]  # Lightning's types are not known here
    """Keeps the module, its optimizers, schedulers and gradient scaler, Lightning's progress, and what is named.

    Args:
        warmup: one forward and backward pass of the module that it is given; see `Checkpoint.restore`.
        durable: a durable checkpoint to start from; see `Checkpoint.restore`.
        options: more states by name, such as a sampler, and the options of `Checkpoint`.
    """

    def __init__(
        self, *, warmup: Callable[[Any], Any] | None = None, durable: str | Path | None = None, **options: Any
    ) -> None:
        self._warmup, self._durable, self._options = warmup, durable, options
        self._checkpoint: Checkpoint | None = None
        self._phase = ExitStack()
        self._finished_steps = 0
        self._optimizer_steps = 0
        self.was_stopped = False
        """After fit(): whether this was a planned stop. The script then exits with status 0, to be started again."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the newest state: optimizers are there, and no iterator of a data loader is."""
        states = {
            "model": trainer.strategy.model,
            **_numbered("optimizer", trainer.optimizers),
            **_numbered("scheduler", [config.scheduler for config in trainer.lr_scheduler_configs]),
            "loops": _Loops(trainer.fit_loop),
            "loaders": _Loaders(trainer.fit_loop),
        }
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            states["scaler"] = scaler
        self._checkpoint = Checkpoint(**{"total_steps": max(0, trainer.max_steps), **states, **self._options})
        warmup = None if self._warmup is None else partial(self._warmup, trainer.strategy.model)
        self._finished_steps = self._checkpoint.restore(warmup=warmup, durable=self._durable)
        self._optimizer_steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the step that this batch has finished, if it has."""
        # With several optimizers, Lightning counts several steps.
        if self._checkpoint is None or trainer.global_step == self._optimizer_steps:
            return
        self._optimizer_steps = trainer.global_step
        self._finished_steps += 1
        final = _is_last_step(trainer)
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        lr = trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None
        if not self._checkpoint.step(self._finished_steps, final=final, loss=loss, lr=lr):
            self.was_stopped = trainer.should_stop = True

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Declare the validation, in which no step is finished."""
        if self._checkpoint is not None:
            self._phase.enter_context(self._checkpoint.phase("validation"))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """The validation is over."""
        self._phase.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the connection to the agent, which keeps the state."""
        self._phase.close()
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None


class _Loops:
    """Lightning's progress: epochs, batches, steps. One state for all ranks, as `finish_steps` says."""

    def __init__(self, fit_loop: Any) -> None:
        self._fit_loop = fit_loop

    def finish_steps(self, n: int) -> None:
        """Lightning counts by itself."""

    def state_dict(self) -> dict[str, Any]:
        state = self._fit_loop.state_dict()
        state["state_dict"].pop(_LOADERS, None)
        return {"progress": tuple(state.items())}  # a tuple is one value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._fit_loop.load_state_dict(dict(state["progress"]))


class _Loaders:
    """The states of the loaders that have one. They belong to this rank."""

    def __init__(self, fit_loop: Any) -> None:
        self._fit_loop = fit_loop

    def state_dict(self) -> Any:
        return self._fit_loop.on_save_checkpoint().get(_LOADERS, [])

    def load_state_dict(self, state: Any) -> None:
        self._fit_loop.on_load_checkpoint({_LOADERS: state})


def _is_last_step(trainer: Any) -> bool:
    """Whether the step that has just been made is the last one. What ends a run early is not known yet."""
    ends_epoch = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
    return bool(ends_epoch or 0 <= trainer.max_steps <= trainer.global_step)


def _numbered(name: str, objects: list[Any]) -> dict[str, Any]:
    """optimizer, optimizer1, optimizer2, ..."""
    return {f"{name}{number or ''}": value for number, value in enumerate(objects)}
