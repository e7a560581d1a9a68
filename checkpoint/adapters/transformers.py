"""A callback for Hugging Face's Trainer: it keeps every step, and restores the newest one when training begins.

    sampler = ShardedSampler(data, batch_size=8, accumulation=2)

    class ShardedTrainer(Trainer):
        def get_train_dataloader(self):
            return DataLoader(data, batch_sampler=sampler, collate_fn=self.data_collator, generator=torch.Generator())

    ShardedTrainer(model, arguments, train_dataset=data, callbacks=[MusterCallback(sampler=sampler)]).train()

The loader is not prepared by Accelerate, which would divide the samples a second time.
"""

from collections.abc import Callable
from contextlib import ExitStack
from math import inf
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

import muster
from muster.checkpoint.adapters.accelerate import scaler_of, unwrapped
from muster.checkpoint.data.sharded_sampler import ShardedSampler
from muster.checkpoint.format.errors import CheckpointError
from muster.checkpoint.training.loop import Checkpoint

_PROGRESS = ("global_step", "epoch", "total_flos", "num_input_tokens_seen", "log_history", "best_metric")
"""What TrainerState holds of the past."""
_LOGGED = {"loss": "loss", "grad_norm": "gradient_norm", "learning_rate": "lr"}
"""What the Trainer logs, with Muster's names."""
_ROUNDING = 1e-6
"""A whole number of epochs is a sum of parts, and so may be a little less."""


class MusterCallback(TrainerCallback):  # type: ignore[misc]  # the types of transformers are not known here
    """Keeps the model, its optimizer and scheduler, the Trainer's progress, and what is named.

    Args:
        warmup: one forward and backward pass of the Trainer's model_wrapped, for example of a lambda that calls its
            compute_loss; see `Checkpoint.restore`.
        durable: a durable checkpoint to start from; see `Checkpoint.restore`.
        options: more states by name, such as a sampler, and the options of `Checkpoint`.
    """

    def __init__(
        self, *, warmup: Callable[[], Any] | None = None, durable: str | Path | None = None, **options: Any
    ) -> None:
        self._warmup, self._durable, self._options = warmup, durable, options
        self._checkpoint: Checkpoint | None = None
        self._phase: ExitStack | None = None
        self._kept_epoch = 0.0
        self._samplers: list[ShardedSampler] = []
        self.was_stopped = False
        """After train(): whether this was a planned stop. The script then exits with status 0, to be started again."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Load the newest state: the optimizer is there, and no iterator of the data loader is.

        Raises:
            CheckpointError: the Trainer could not go on in the middle of an epoch.
        """
        self._samplers = [value for value in self._options.values() if isinstance(value, ShardedSampler)]
        accumulation = args.gradient_accumulation_steps
        if any(len(sampler) % accumulation for sampler in self._samplers):
            raise CheckpointError(
                f"an epoch of the sampler ends with a step of fewer batches than {accumulation}, and the Trainer makes "
                'this step only if it has read the whole epoch: give the sampler epoch_end="carry" or "drop", and '
                f"accumulation={accumulation}"
            )
        states = {
            "model": objects["model"],
            "optimizer": unwrapped(objects["optimizer"]),
            "scheduler": unwrapped(objects["lr_scheduler"]),
            "trainer": _Progress(state),
        }
        if (scaler := scaler_of(objects["optimizer"])) is not None:
            states["scaler"] = scaler
        self._checkpoint = Checkpoint(**{"total_steps": max(0, state.max_steps), **states, **self._options})
        self._checkpoint.restore(warmup=self._warmup, durable=self._durable)
        self._kept_epoch = state.epoch or 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Keep the step."""
        assert self._checkpoint is not None
        # The Trainer counts epochs from 0. Its first one is the rest of the epoch that was kept.
        state.epoch += self._kept_epoch if state.epoch <= 1 else int(self._kept_epoch + _ROUNDING)
        # The Trainer counts the epochs of a restored run anew, and knows only how many steps they have at most.
        first_left_out = args.num_train_epochs if args.max_steps <= 0 else inf
        ends = any(sampler.epoch_after(1) >= first_left_out for sampler in self._samplers)
        final = state.global_step >= state.max_steps or ends
        if not self._checkpoint.step(state.global_step, final=final):
            self.was_stopped = control.should_training_stop = True
        control.should_training_stop |= ends

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **objects: Any) -> None:
        """Say what the Trainer logs of its training: it gives loss and gradient norm to nobody before."""
        muster.log(state.global_step, **{name: logs[key] for key, name in _LOGGED.items() if key in (logs or {})})

    def on_prediction_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Declare the evaluation, in which no step is finished, with its first batch."""
        if self._checkpoint is not None and self._phase is None:
            self._phase = ExitStack()
            self._phase.enter_context(self._checkpoint.phase("evaluation"))

    def on_evaluate(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """The evaluation is over."""
        if self._phase is not None:
            self._phase.close()
        self._phase = None

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Close the connection to the agent, which keeps the state."""
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None


class _Progress:
    """The Trainer's progress: steps, epoch, what was logged. One state for all ranks, as `finish_steps` says."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def finish_steps(self, n: int) -> None:
        """The Trainer counts by itself."""

    def state_dict(self) -> dict[str, Any]:
        # A tuple is one value: the log grows, and its lines would be values with new names.
        return {"progress": tuple((name, getattr(self._state, name)) for name in _PROGRESS)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["progress"]:
            setattr(self._state, name, value)
