"""How long a rank computes in each step, and how long it waits for the others.

In a synchronous job all ranks show the same step time, because the fast ranks wait for the slow one when the gradients
are summed. So two moments of each step are noted, through documented hooks of PyTorch:

1. The last gradient of this rank is complete (a post-accumulate hook of one parameter). Nothing is left to compute.
2. The optimizer is about to step (its pre-hook). The gradients of all ranks are summed.

The time between them is the wait, and the rest of the step is the compute time. The rank that all others wait for has
the longest compute time. The parameter whose gradient comes last is learned in one step, and then has the only hook.

On a GPU a moment is an event in the stream. Its time is read when it has passed; the GPU is never waited for. A step
without both moments is not measured (FSDP2 sums gradients without these hooks), nor is one with a declared phase.

Rejected: the time of each collective. That of a fast rank overlaps with its backward pass, so its length is no wait,
and the hooks of process groups are private or say only when a call was issued.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from muster.v1.rank_pb2 import StepTime

MAX_PENDING = 8
"""Steps whose moments may still be ahead of the GPU. The measurement of older steps is dropped."""
MAX_TIME_US = (1 << 32) - 1
"""The longest time that a StepTime holds, in microseconds (71 min)."""
MAX_LESSONS = 16
"""How often the parameter whose gradient comes last is learned. Where it differs from step to step, measuring costs
more than it is worth."""


class Clock(Protocol):
    """Where the moments of a step are noted. A moment is opaque."""

    def note(self) -> Any:
        """The present moment; None if it can't be noted now."""

    def has_passed(self, moment: Any) -> bool:
        """The device has come to this moment. Does not wait."""

    def between_us(self, first: Any, second: Any) -> float:
        """Microseconds between two moments that have passed."""


class HostClock:
    """For training on CPUs: the backward pass returns when the gradients are summed.

    Args:
        now: the present moment, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now

    def note(self) -> float:
        """The present moment, in seconds."""
        return self._now()

    def has_passed(self, moment: float) -> bool:
        """A moment of the host has always passed."""
        return True

    def between_us(self, first: float, second: float) -> float:
        """Microseconds between two moments."""
        return (second - first) * 1e6


class CudaClock:
    """For training on a GPU: moments of the stream in which the step runs. It waits there for NCCL."""

    def note(self) -> Any:
        """An event in the present stream; None while the stream is captured into a graph."""
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, moment: Any) -> bool:
        """The GPU has come to the event."""
        return bool(moment.query())

    def between_us(self, first: Any, second: Any) -> float:
        """Microseconds of the GPU between two events."""
        return float(first.elapsed_time(second)) * 1000


@dataclass(frozen=True, slots=True)
class _Moments:
    step: int
    begin: Any
    last_gradient: Any
    summed: Any
    end: Any
    fetch_us: float


class StepTimer:
    """Measures the steps of one rank.

    Args:
        parameters: the parameters of the models.
        optimizers: the optimizers that step once the gradients are summed.
        clock: where moments are noted.
    """

    def __init__(self, parameters: Iterable[Any], optimizers: Iterable[torch.optim.Optimizer], clock: Clock) -> None:
        self._parameters = list(parameters)
        self._clock = clock
        self._pending: deque[_Moments] = deque(maxlen=MAX_PENDING)
        self._begin: Any = None
        self._last_gradient: Any = None
        self._summed: Any = None
        self._fetch_us = 0.0
        self._last_index: int | None = None
        self._learns = False
        self._lessons = 0
        self._gradient_hooks: list[Any] = []
        self._optimizer_hooks = [optimizer.register_step_pre_hook(self._on_optimizer) for optimizer in optimizers]
        self._learn()

    @classmethod
    def of_states(cls, states: Collection[Any], host_clock: HostClock) -> "StepTimer | None":
        """The timer for a user's models and optimizers; None if these can't be measured.

        `host_clock`: where moments are noted if the models are on CPUs.
        """
        modules = [state for state in states if isinstance(state, nn.Module)]
        optimizers = [state for state in states if isinstance(state, torch.optim.Optimizer)]
        parameters = {id(p): p for module in modules for p in module.parameters()}
        kinds = {parameter.device.type for parameter in parameters.values()}
        clocks: dict[str, Clock] = {"cpu": host_clock, "cuda": CudaClock()}
        if not optimizers or len(kinds) != 1 or not kinds <= clocks.keys():
            return None
        return cls(parameters.values(), optimizers, clocks[kinds.pop()])

    def begin_step(self) -> None:
        """The user's code goes on with the next step."""
        self._last_gradient = self._summed = None
        self._fetch_us = 0.0
        self._begin = self._clock.note()

    def add_fetch(self, fetch_us: float) -> None:
        """The user's code has waited so many microseconds for its next batch, by the host's clock."""
        self._fetch_us += fetch_us

    def void_step(self) -> None:
        """Do not measure the present step."""
        self._begin = None

    def end_step(self, step: int) -> None:
        """The user's code has finished `step`."""
        if self._begin is not None and self._summed is not None:
            end = self._clock.note()
            if end is not None:
                moments = _Moments(step, self._begin, self._last_gradient, self._summed, end, self._fetch_us)
                self._pending.append(moments)
        self._begin = None

    def measured(self) -> list[StepTime]:
        """The steps that were measured since the last call, as far as the device has come; oldest first."""
        found = []
        while self._pending and self._clock.has_passed(self._pending[0].end):
            found.append(self._step_time(self._pending.popleft()))
        return found

    def close(self) -> None:
        """Remove all hooks."""
        for hook in (*self._gradient_hooks, *self._optimizer_hooks):
            hook.remove()

    def _step_time(self, moments: _Moments) -> StepTime:
        wait = self._clock.between_us(moments.last_gradient, moments.summed)
        whole = self._clock.between_us(moments.begin, moments.end)
        compute = min(max(0, int(whole - wait)), MAX_TIME_US)
        fetch = min(max(0, int(moments.fetch_us)), compute)
        wait = min(max(0, int(wait)), MAX_TIME_US)
        return StepTime(step=moments.step, compute_us=compute, wait_us=wait, fetch_us=fetch)

    def _learn(self) -> None:
        """For one step, note the order of the gradients."""
        self._unhook_gradients()
        self._last_index = None
        self._learns = self._lessons < MAX_LESSONS
        if self._learns:
            self._lessons += 1
            self._gradient_hooks = [
                parameter.register_post_accumulate_grad_hook(partial(self._on_any_gradient, index))
                for index, parameter in enumerate(self._parameters)
                if parameter.requires_grad  # a user may freeze one at any time
            ]

    def _unhook_gradients(self) -> None:
        for hook in self._gradient_hooks:
            hook.remove()
        self._gradient_hooks = []

    def _on_any_gradient(self, index: int, _: Any) -> None:
        self._last_index = index

    def _on_last_gradient(self, _: Any) -> None:
        self._last_gradient = self._clock.note()

    def _on_optimizer(self, *_: Any) -> None:
        if self._learns:
            if self._last_index is None:
                return  # no parameter has got a gradient yet
            self._unhook_gradients()
            self._learns = False
            last = self._parameters[self._last_index]
            self._gradient_hooks = [last.register_post_accumulate_grad_hook(self._on_last_gradient)]
        elif self._last_gradient is None:
            self._learn()  # that parameter took no part in this step
        elif self._last_gradient is not None and self._summed is None:
            self._summed = self._clock.note()
