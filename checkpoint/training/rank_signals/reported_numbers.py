"""What a script says of a step: loss, gradient norm, tokens, learning rate, and numbers of its own.

They go into a page of shared memory (`number_page`), which the agent reads each two seconds. A step that says the same
names again within half a second costs no more than to look at the clock. A value of a GPU is copied beside the
training, and is read when the copy is there: the GPU is never waited for.

Needs no torch. Outside Muster, and where the agent has ended, nothing happens.
"""

from __future__ import annotations

import array
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from muster.checkpoint.format.number_page import MOST_NUMBERS, MOST_STEPS, SAMPLER_POSITION, NumberPage, RankNumbers
from muster.v1.rank_pb2 import RankMessage, RankPage

log = logging.getLogger(__name__)

INTERVAL_S = 0.5
"""Seconds for which names that were written together are not written again. The agent looks less often."""
_MOST_DUE = 64
"""Sets of names. More are not remembered."""

Pending = tuple[int, dict[str, Any], Any]
"""A step, its values on their way from the GPU, and the event after their copies."""


class ReportedNumbers:
    """Those of one process.

    Args:
        send: gives the page to the agent, by its descriptor; returns whether that worked.
        now: the monotonic clock.
    """

    def __init__(self, send: Callable[[int], bool], now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._pid = os.getpid()
        self.due: dict[tuple[str, ...], float] = {}
        """Names that were said together, and when they are written again."""
        self._numbers: dict[str, tuple[int, float]] = {}
        self._pending: Pending | None = None
        self._step, self._at_s, self._last_step, self._flops = 0, 0.0, 0, 0.0
        self._skips_batches = False
        self._sampler_position: Callable[[], Any] = lambda: None
        page = NumberPage()
        self._page = page if send(page.descriptor) else None
        page.close_descriptor()

    def note(self, step: int | None, numbers: Mapping[str, Any]) -> None:
        """The script has finished `step`, and says these numbers of it: numbers, or tensors of one element."""
        if self._now() >= self.due.get(tuple(numbers), 0.0):
            self._write(step, numbers)

    def set_total(self, last_step: int) -> None:
        """The last step of the whole training."""
        if (last_step := _whole(last_step)) != self._last_step:
            self._last_step = last_step
            self.due.clear()

    def set_sampler(self, position: Callable[[], Any]) -> None:
        """A sampler of this rank can skip batches. `position`: the samples of finished steps, of all ranks; None: it
        does not say."""
        self._skips_batches = True
        self._sampler_position = position
        self.due.clear()

    def set_flops(self, flops: float) -> None:
        """Floating-point operations of this rank in one step."""
        self._flops = flops
        self.due.clear()

    def _write(self, step: int | None, numbers: Mapping[str, Any]) -> None:
        now = self._now()
        if len(self.due) >= _MOST_DUE:
            self.due.clear()
        self.due[tuple(numbers)] = now + INTERVAL_S
        if self._page is None or self._pid != os.getpid():  # a process of the script's own, such as a data loader
            return
        if step is not None:
            self._step, self._at_s = _whole(step), now
        self._take_pending()
        late = {}
        for name, value in (*numbers.items(), (SAMPLER_POSITION, self._sampler_position())):
            if value is None or (name not in self._numbers and len(self._numbers) >= MOST_NUMBERS):
                continue
            if _is_on_gpu(value):
                late[name] = value
            elif (number := _number(value)) is not None:
                self._numbers[name] = (self._step, number)
        if late and self._pending is None:
            self._pending = _copied(self._step, late)
        said = RankNumbers(self._step, self._at_s, self._last_step, self._flops, self._numbers, self._skips_batches)
        self._page.write(said)

    def _take_pending(self) -> None:
        """Take the values whose copies have arrived."""
        if self._pending is not None and self._pending[2].query():
            step, values, _ = self._pending
            self._numbers |= {name: (step, float(value)) for name, value in values.items()}
            self._pending = None


def _is_on_gpu(value: Any) -> bool:
    return bool(getattr(value, "is_cuda", False))


def _number(value: Any) -> float | None:
    """A plain number, an array or a tensor of one element; None: it is something else."""
    try:
        if hasattr(value, "detach"):
            value = _local(value.detach())
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _whole(value: Any) -> int:
    """A number of steps: a script may count in NumPy's integers, in floats, or in tensors. 0: it is none."""
    number = _number(value)
    return int(number) if number is not None and 0 <= number < MOST_STEPS else 0


def _local(tensor: Any) -> Any:
    """This rank's part: the whole of a DTensor would take a collective call."""
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


def _copied(step: int, values: Mapping[str, Any]) -> Pending | None:
    """Begin to copy values from the GPU. None while its stream is captured into a graph."""
    torch = sys.modules["torch"]
    if torch.cuda.is_current_stream_capturing():
        return None
    parts = {name: _local(value.detach()) for name, value in values.items()}
    copies = {}
    for name, part in parts.items():
        if part.numel() == 1:
            copies[name] = torch.empty_like(part, device="cpu", pin_memory=True)
            copies[name].copy_(part, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(next(iter(parts.values())).device))
    return step, copies, event


_of_process: ReportedNumbers | None = None
_looked = False


def of_process() -> ReportedNumbers | None:
    """The numbers of this process, made at the first call; None outside Muster, and in processes that a rank has
    started."""
    global _of_process, _looked
    if not _looked:
        _looked = True
        descriptor = os.environ.get("MUSTER_AGENT_FD")
        if descriptor is not None and not _is_started_by_rank():
            _of_process = ReportedNumbers(lambda page: _send(int(descriptor), page))
    return _of_process


def _is_started_by_rank() -> bool:
    """This process is a data loader, say, and not the rank."""
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.__dict__["parent_process"]() is not None


def _send(agent: int, page: int) -> bool:
    """Send the page over the rank's socket, of which `agent` is the descriptor."""
    try:
        with socket.socket(fileno=os.dup(agent)) as link:
            if (link.family, link.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
                return False  # the connection is closed, and another file has its number
            return send_page(link, page)
    except OSError as error:
        log.info("what the script says of its steps is not reported: %s", error)
        return False


def send_page(link: socket.socket, page: int) -> bool:
    """Send the page over a rank's connection to its agent; returns whether that worked."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [page]))
    try:
        link.sendmsg([RankMessage(page=RankPage()).SerializeToString()], [rights], socket.MSG_NOSIGNAL)
    except OSError as error:
        log.info("what the script says of its steps is not reported: %s", error)
        return False
    return True
