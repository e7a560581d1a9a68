"""Copies between tensors in host memory, by several threads and at the speed of memory.

PyTorch copies tensor by tensor, and all of its threads wait for each other after each one. Where other processes use
the cores, too, each of these waits lasts until the last thread gets a core: a state of many tensors takes several times
as long as its bytes need. Here each thread takes the next part when it is done with one, and the caller is one of the
threads, so nobody waits for a thread that has not begun.
"""

import ctypes
import threading
from collections import deque

import torch

MAX_THREADS = 16
"""More threads than this do not copy faster: the memory is the limit."""
_LEAST_BYTES_PER_THREAD = 8 << 20
"""A thread takes some 0.1 ms to start, in which this much is copied."""
_MAX_PART_BYTES = 256 << 20
"""The C library copies large parts around the caches, which is faster. More than this gains nothing."""

TensorCopy = tuple[torch.Tensor, torch.Tensor]
"""Target and source."""
_Part = tuple[int, int, int]
"""Address of the target, address of the source, bytes."""


def copy_tensors(copies: list[TensorCopy], *, fitting_targets: bool = False) -> None:
    """Copy each source to its target, with as many threads as PyTorch may use. Returns when all is copied.

    `fitting_targets`: each target is plain (`is_plain`), and has its source's dtype and shape.
    """
    parts: list[_Part] = []
    total: int = sum(target.nbytes for target, _ in copies)
    limit = max(_LEAST_BYTES_PER_THREAD, min(_MAX_PART_BYTES, total // (4 * _threads_for(total))))
    with torch.no_grad():
        for target, source in copies:
            if is_plain(source) if fitting_targets else _is_same_kind(target, source):
                parts += _parts_of(target, source, limit)
            else:
                target.copy_(source)
    _run(parts, _threads_for(total))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are its bytes, one after the other in host memory. Subclasses may mean other bytes."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _is_same_kind(target: torch.Tensor, source: torch.Tensor) -> bool:
    return is_plain(target) and is_plain(source) and (target.dtype, target.shape) == (source.dtype, source.shape)


def _threads_for(size: int) -> int:
    threads: int = min(torch.get_num_threads(), MAX_THREADS, size // _LEAST_BYTES_PER_THREAD)
    return max(1, threads)


def _parts_of(target: torch.Tensor, source: torch.Tensor, limit: int) -> list[_Part]:
    """One copy in parts of `limit` bytes at most."""
    to, of, size = target.data_ptr(), source.data_ptr(), target.nbytes
    return [(to + start, of + start, min(limit, size - start)) for start in range(0, size, limit)]


def _run(parts: list[_Part], threads: int) -> None:
    """Copy all parts, the largest first, so that all threads end at about the same moment. The threads live for one
    call: a process that forks has none of them."""
    rest = deque(sorted(parts, key=lambda part: -part[2]))
    helpers = [threading.Thread(target=_copy_parts, args=(rest,), daemon=True) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    _copy_parts(rest)
    for helper in helpers:
        helper.join()


def _copy_parts(rest: deque[_Part]) -> None:
    while True:
        try:
            target, source, size = rest.popleft()
        except IndexError:
            return
        ctypes.memmove(target, source, size)  # other Python threads run meanwhile
