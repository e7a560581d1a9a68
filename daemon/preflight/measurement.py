"""What is measured with PyTorch on GPUs, or with numpy: a known product, the arithmetic rate, copies of memory.

Each rate is the best of several tries, so that a short disturbance changes nothing.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from muster.daemon.preflight import inventory, known_product

_RATE_S = 0.3
"""Seconds for which a rate is measured."""
_MIN_TRIES, _MAX_TRIES = 3, 50
_COPY_BYTES = 256 << 20
"""Bytes of a copy, if a small share of the free memory is enough for it: more than most caches hold."""
_COPY_BYTES_OF_THREAD = 128 << 20
"""The same for one thread. The kernel needs most of the check's time to find the pages of the copies."""
_COPY_SHARE = 16
"""The copy takes no more than this part of the free memory."""
_HOST_TO_DEVICE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one processor or GPU. `right`: each of its products was the known one. Rates as in CheckResult."""

    right: bool
    gflops: float
    memory_gb_s: float
    host_to_device_gb_s: float = 0.0


def measure_gpu(torch: Any, index: int) -> Measured:
    """One GPU, with torch."""
    device = torch.device("cuda", index)
    torch.backends.cuda.matmul.allow_tf32 = True  # the operands are exact in it
    first, second = _torch_operands(torch, known_product.LARGE, device)

    def finish() -> None:
        torch.cuda.synchronize(device)

    right, gflops = _multiply(lambda: first @ second, known_product.LARGE, _torch_bytes(torch), torch.equal, finish)
    source = torch.ones(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    memory = 2 * _COPY_BYTES / _best_s(lambda: target.copy_(source), finish)
    pinned = torch.ones(_HOST_TO_DEVICE_BYTES // 4).pin_memory()
    received = torch.empty(_HOST_TO_DEVICE_BYTES // 4, device=device)
    upload = _HOST_TO_DEVICE_BYTES / _best_s(lambda: received.copy_(pinned, non_blocking=True), finish)
    return Measured(right, gflops, memory / 1e9, upload / 1e9)


def measure_processors(torch: Any) -> Measured:
    """All processors that this process may use, with torch."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    first, second = _torch_operands(torch, known_product.SMALL, "cpu")
    right, gflops = _multiply(lambda: first @ second, known_product.SMALL, _torch_bytes(torch), torch.equal)
    size = _copy_bytes()
    source = torch.ones(size // 4)
    target = torch.empty_like(source)
    return Measured(right, gflops, 2 * size / _best_s(lambda: target.copy_(source)) / 1e9)


def measure_with_numpy(numpy: Any) -> Measured:
    """The processors, with numpy."""
    integers = known_product.operands(numpy.arange(known_product.SMALL, dtype=numpy.int64))
    first, second = (matrix.astype(numpy.float32) for matrix in integers)

    def as_bytes(product: Any) -> bytes:
        return bytes(product.astype("<i4").tobytes())

    right, gflops = _multiply(lambda: first @ second, known_product.SMALL, as_bytes, numpy.array_equal)
    size = _copy_bytes(_COPY_BYTES_OF_THREAD)
    source = numpy.ones(size // 4, dtype=numpy.float32)
    target = numpy.empty_like(source)
    return Measured(right, gflops, 2 * size / _best_s(lambda: numpy.copyto(target, source)) / 1e9)


def _copy_bytes(most: int = _COPY_BYTES) -> int:
    return max(1 << 20, min(most, inventory.available_bytes() // _COPY_SHARE))


def _torch_operands(torch: Any, rows: int, device: Any) -> tuple[Any, Any]:
    first, second = known_product.operands(torch.arange(rows, dtype=torch.int64, device=device))
    return first.float(), second.float()


def _torch_bytes(torch: Any) -> Callable[[Any], bytes]:
    """Converts a product to bytes. Tensors have no method for that unless numpy is installed."""

    def convert(product: Any) -> bytes:
        whole = product.to(torch.int32).cpu().contiguous()
        return ctypes.string_at(whole.data_ptr(), whole.numel() * 4)

    return convert


def _multiply(
    multiply: Callable[[], Any],
    rows: int,
    as_bytes: Callable[[Any], bytes],
    equal: Callable[[Any, Any], bool],
    finish: Callable[[], None] = lambda: None,
) -> tuple[bool, float]:
    """Whether every product was the known one, and the rate in GFLOP/s."""
    known = multiply()
    right = known_product.is_right(as_bytes(known), rows)
    newest, times_s = [known], []

    def again() -> None:
        newest[0] = multiply()

    for took_s in _tries(again, finish):
        times_s.append(took_s)
        right = right and bool(equal(newest[0], known))
    return right, 2.0 * rows**3 / min(times_s) / 1e9


def _best_s(work: Callable[[], object], finish: Callable[[], None] = lambda: None) -> float:
    """The shortest of several tries, in seconds."""
    return min(_tries(work, finish))


def _tries(work: Callable[[], object], finish: Callable[[], None]) -> Iterator[float]:
    """Work again and again, and yield the seconds of each try. `finish` waits until the work is done."""
    finish()
    spent_s = 0.0
    for number in range(_MAX_TRIES):
        if number >= _MIN_TRIES and spent_s >= _RATE_S:
            return
        began = time.perf_counter()
        work()
        finish()
        took_s = time.perf_counter() - began
        spent_s += took_s
        yield took_s
