"""A training process: a model with AdamW on CPU, kept by `muster.checkpoint.Checkpoint`, and by PyTorch's own means.

Served by a `worker.Worker`. It is forked from a process that has imported torch, as Muster's own ranks are.
"""

from __future__ import annotations

import logging
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from benchmarks.checkpoint.memory_copy import MemoryCopy
from muster.checkpoint import Checkpoint
from muster.checkpoint.training.agent_connection import AgentConnection

WIDTH = 1024
"""Rows and columns of each layer. Its weight and both of its optimizer states have 4 MiB each."""
_LAYER_BYTES = 3 * WIDTH * WIDTH * 4
_PRODUCT_ROWS, _CALIBRATION_PRODUCTS = 1024, 20

warnings.filterwarnings("ignore", module="torch.distributed")
logging.getLogger("torch").setLevel(logging.ERROR)


def layers_of(gib: float) -> int:
    """How many layers have about so many GiB of weights and optimizer states."""
    return max(1, round(gib * 2**30 / _LAYER_BYTES))


class TrainingRank:
    """One rank.

    Args:
        gib: GiB of weights and optimizer states.
        threads: threads of torch.
        trained: whether the optimizer has states already; a rank that restores has none yet.
    """

    def __init__(self, gib: float, threads: int, trained: bool) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        self._threads = threads
        self._model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers_of(gib))))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        if trained:
            self._fill_optimizer()
        self._checkpoint: Checkpoint | None = None
        self._copy: MemoryCopy | None = None
        self._copy_target: torch.Tensor | None = None
        self._done, self._every = 0, 1
        self._products = 0
        self._factor = torch.randn(_PRODUCT_ROWS, _PRODUCT_ROWS)
        self._product = torch.empty_like(self._factor)

    def _fill_optimizer(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _tensors(self) -> Iterator[torch.Tensor]:
        for parameter in self._model.parameters():
            yield parameter.detach()
            state = self._optimizer.state[parameter]
            yield from (state[name] for name in ("exp_avg", "exp_avg_sq") if name in state)

    def state_bytes(self) -> int:
        """Bytes of all weights and optimizer states."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def change(self) -> None:
        """Change every tensor, as an optimizer's step does: no byte of a version is that of another one."""
        with torch.no_grad():
            torch._foreach_add_(list(self._tensors()), 1e-3)

    def sums(self) -> list[int]:
        """The sum of each tensor's words: equal if all bytes are equal, and hardly otherwise."""
        return [int(tensor.view(torch.int32).sum()) for tensor in self._tensors()]

    # Muster.

    def attach(self, generation: int, every: int, descriptor: int) -> None:
        """Connect to the agent, at the start of a job. `every`: steps between snapshots."""
        self._keep(AgentConnection(descriptor, 0, generation), every).restore()

    def _keep(self, link: AgentConnection, every: int) -> Checkpoint:
        self._every = every
        self._checkpoint = Checkpoint(every=every, link=link, model=self._model, optimizer=self._optimizer)
        return self._checkpoint

    def step(self) -> tuple[int, float, float]:
        """Finish a step. Returns its number, the seconds for which `Checkpoint.step` held this thread, and the moment
        (time.monotonic) when it returned."""
        assert self._checkpoint is not None
        self._done += 1
        began = time.monotonic()
        self._checkpoint.step(self._done)
        ended = time.monotonic()
        return self._done, ended - began, ended

    def restore(self, generation: int, descriptor: int) -> tuple[float, float]:
        """Connect to the agent, and load the state that it gives. Returns the moments (time.monotonic) when the
        verified bytes could be mapped, and when they were in the tensors."""
        link = AgentConnection(descriptor, 0, generation)
        joined, join = [0.0], link.join

        def noted_join() -> Any:
            start = join()
            joined[0] = time.monotonic()
            return start

        link.join = noted_join  # type: ignore[method-assign]
        self._done = self._keep(link, 1).restore()
        return joined[0], time.monotonic()

    def work(self, steps: int, step_s: float, kept: bool) -> tuple[int, float, float]:
        """Do some steps of matrix products that take about `step_s` each.

        Args:
            kept: the steps begin with the next one for which a snapshot is due, otherwise no snapshot is due in them.

        Returns:
            The number of the first step, and the mean seconds of the products in a step and of a whole step.
        """
        assert self._checkpoint is not None
        if not self._products:
            began = time.monotonic()
            self._multiply(_CALIBRATION_PRODUCTS)
            self._products = max(1, round(step_s * _CALIBRATION_PRODUCTS / (time.monotonic() - began)))
        if kept:
            self._done = (self._done // self._every + 1) * self._every - 1
        first, multiplying_s, began = self._done + 1, 0.0, time.monotonic()
        for _ in range(steps):
            self._done += 1
            self._checkpoint.step(self._done)
            stepped = time.monotonic()
            self._multiply(self._products)
            multiplying_s += time.monotonic() - stepped
        return first, multiplying_s / steps, (time.monotonic() - began) / steps

    def _multiply(self, times: int) -> None:
        with torch.no_grad():
            for _ in range(times):
                torch.mm(self._factor, self._factor, out=self._product)

    # What it is compared with.

    def memcpy(self) -> float:
        """Seconds of a plain copy of the same bytes with the same number of threads, into memory touched before."""
        if self._copy is None:
            target = torch.zeros(self.state_bytes(), dtype=torch.uint8)
            regions, start = [], target.data_ptr()
            for tensor in self._tensors():
                regions.append((tensor.data_ptr(), start, tensor.nbytes))
                start += tensor.nbytes
            self._copy, self._copy_target = MemoryCopy(regions, self._threads), target
        return _seconds(self._copy.run)

    def torch_save(self, folder: str) -> float:
        """Seconds of `torch.save` into the folder."""
        return self._saving(Path(folder), lambda path: torch.save(self._state(), path / "state.pt"))

    def dcp_save(self, folder: str) -> float:
        """Seconds of `torch.distributed.checkpoint.save` into the folder."""
        return self._saving(Path(folder), lambda path: dcp.save(self._state(), checkpoint_id=path, no_dist=True))

    def dcp_async_save(self, folder: str) -> float:
        """Seconds until `torch.distributed.checkpoint.async_save` lets the training go on."""
        path = Path(folder)
        path.mkdir()
        began = time.monotonic()
        saved = dcp.async_save(self._state(), checkpoint_id=path, no_dist=True)
        stalled_s = time.monotonic() - began
        saved.result()
        shutil.rmtree(path)
        return stalled_s

    def _saving(self, path: Path, save: Callable[[Path], Any]) -> float:
        path.mkdir()
        taken_s = _seconds(lambda: save(path))
        shutil.rmtree(path)
        return taken_s

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}


def _seconds(work: Callable[[], Any]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began
