"""Copies of a snapshot that are made after `Checkpoint.step` has returned, beside the next forward and backward pass.

Two kinds of tensors may be copied late: parameters, and the optimizers' own states. Forward and backward passes only
read them. An optimizer changes them, and each kept optimizer waits at the begin of its step until they are copied.

A script may change a parameter elsewhere, for example clamp it in place. Two checks find that. The first compares the
version counters that torch keeps for all tensors. A change through `.data` does not raise them. So the second check
compares the first late copies of each plan with the tensors, just before the optimizer changes these. A snapshot that
fails a check is reported as skipped. From then on everything is copied before `step` returns.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch

from muster.checkpoint.training.copies.memory_copy import TensorCopy
from muster.checkpoint.training.states.inner_tensors import taken_apart
from muster.checkpoint.training.states.optimizer_states import owner, parameters_of
from muster.checkpoint.training.states.training_state import StateLeaf

log = logging.getLogger(__name__)

THREAD_NAME = "late copies"
"""Of the threads that copy."""


class LateCopies:
    """The late copies of one rank, of one snapshot at a time.

    Args:
        optimizers: those whose parameters and states are copied late.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        stepping = {id(each): each for optimizer in self._optimizers for each in (optimizer, owner(optimizer))}
        self._hooks = [each.register_step_pre_hook(self._before_step) for each in stepping.values()]
        self._copies: list[TensorCopy] = []
        self._report: Callable[[bool], None] = _no_report
        self._watched: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._thread: threading.Thread | None = None
        self._is_complete = False
        self._compares_bytes = True
        self._waited_s = 0.0
        self.leaves: frozenset[int] = frozenset()
        """Numbers of the leaves of the state that are copied late."""
        self.usable = True
        """Whether a snapshot may be copied late: no check has failed so far."""

    def begin_plan(self, leaves: list[StateLeaf]) -> None:
        """Find what may be copied late in the states that follow. The bytes of the next snapshot are compared."""
        tensors = [parameter for optimizer in self._optimizers for parameter in parameters_of(optimizer)]
        for optimizer in self._optimizers:
            for state in owner(optimizer).state.values():
                tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        memory = {address for tensor in tensors for address in _addresses(tensor)}
        self.leaves = frozenset(
            number
            for number, leaf in enumerate(leaves)
            if isinstance(leaf.value, torch.Tensor) and memory.issuperset(_addresses(leaf.value))
        )
        self._compares_bytes = True

    def start(
        self,
        copies: list[TensorCopy],
        leaves: list[StateLeaf],
        copy: Callable[[list[TensorCopy]], None],
        report: Callable[[bool], None],
    ) -> None:
        """Begin to copy.

        Args:
            copies: targets in a slot, and sources: the plain tensors of the leaves that are copied late.
            leaves: all leaves of the state.
            copy: copies them, and returns when all is copied. It runs in a thread, on streams of its own on GPUs.
            report: called once all is copied, with whether no source has changed meanwhile. No other call of this
                object returns before that, but it may be called in the thread.
        """
        self._copies, self._report, self._is_complete = copies, report, False
        # A DTensor counts its changes itself, and not in its local tensor.
        self._watched = [source for _, source in copies] + [leaves[number].value for number in sorted(self.leaves)]
        self._versions = [tensor._version for tensor in self._watched]
        gpus = {source.device for _, source in copies if source.is_cuda}
        ready = {gpu: torch.cuda.current_stream(gpu).record_event() for gpu in gpus}
        # No daemon: the interpreter would unmap the slots at its end while the thread writes to them.
        self._thread = threading.Thread(target=self._run, args=(copy, ready), name=THREAD_NAME)
        self._thread.start()

    def _run(self, copy: Callable[[list[TensorCopy]], None], ready: dict[torch.device, Any]) -> None:
        """Copy when the GPUs have computed what there is to copy."""
        try:
            with ExitStack() as streams:
                for gpu, event in ready.items():
                    stream = torch.cuda.Stream(gpu)
                    stream.wait_event(event)
                    streams.enter_context(torch.cuda.stream(stream))
                copy(self._copies)
            self._is_complete = True
        except RuntimeError as error:  # of the GPU's driver; the training will meet it, too
            log.error("a snapshot is incomplete: %s", error)
        if not self._compares_bytes:
            self._end()

    def wait(self) -> None:
        """Return when all is copied and reported. For the thread that trains."""
        if self._thread is None:
            return
        began = time.monotonic()
        self._thread.join()
        self._thread = None
        if self._compares_bytes:
            self._end()
        self._waited_s += time.monotonic() - began

    def take_waited_s(self) -> float:
        """The seconds for which training has waited for late copies since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def close(self) -> None:
        """Wait for the copies, and let the optimizers be."""
        self.wait()
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, *_: Any) -> None:
        self.wait()

    def _end(self) -> None:
        """Check the copies, and report them."""
        is_intact = self._is_complete and not self._has_changed()
        if not is_intact:
            self.usable = False
        report, self._report = self._report, _no_report
        self._copies, self._watched, self._compares_bytes = [], [], False
        report(is_intact)

    def _has_changed(self) -> bool:
        """Whether a source has changed since the copies began."""
        changed = any(tensor._version != at for tensor, at in zip(self._watched, self._versions, strict=True))
        if not changed and self._compares_bytes:
            changed = not all(_is_equal(target, source) for target, source in self._copies)
        if changed:
            log.warning(
                "something else than an optimizer's step has changed a parameter or an optimizer's state after "
                "Checkpoint.step: this snapshot is dropped, and the next ones are copied before step() returns. "
                "overlap=False says so from the start"
            )
        return changed


def _addresses(tensor: torch.Tensor) -> list[tuple[torch.device, int]]:
    """The memory of the plain tensors that a tensor consists of. Views of one tensor are in the same memory."""
    return [(part.device, part.untyped_storage().data_ptr()) for part in taken_apart(tensor.detach())[0]]


def _is_equal(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes: a NaN equals itself."""
    of_source, of_target = (each.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for each in (source, target))
    return bool(torch.equal(of_target, of_source))


def _no_report(is_intact: bool) -> None:
    """Nothing is being copied."""
