"""Tensors that are a slot's bytes at first: a restore maps them, and copies no byte.

An optimizer keeps the tensors that it is given. They can lie in the private mapping of the slot: the kernel copies each
page when this process writes to it for the first time, and the slot never changes by that. Until then whatever is
written to the slot is seen in the tensor. So all pages that are still in use after the restore are copied beside the
training, and no slot is written before that is done.

The mapping lives as long as any of these tensors. So do the slot's own pages, even if the agent gives other slots.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from muster.checkpoint.format import touched_memory

SMALL_BYTES = 64 << 10
"""Tensors of at most so many bytes are copied at once: an optimizer's counters would else keep a whole slot mapped,
also where all large tensors go to a GPU."""
CHUNK_BYTES = 4 << 20
"""Bytes that are copied at a time, in some milliseconds: the process can map no other memory meanwhile."""


class BorrowedPages:
    """The tensors of one restore, until each byte of them is this process's own.

    Args:
        touch: makes the pages of a range this process's own; returns False if it can't.
    """

    def __init__(self, touch: Callable[[int, int], bool] = touched_memory.touch) -> None:
        self._touch = touch
        self._borrowed: list[weakref.ref[memoryview]] = []
        """The bytes of each tensor. They live as long as any tensor uses their storage."""
        self._left: list[memoryview] = []
        """Those that the kernel has not copied."""
        self._thread: threading.Thread | None = None

    def tensor(self, data: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A tensor of the bytes `data`, which lie in a private mapping. Its storage holds no byte around them."""
        if not len(data):
            return torch.empty(tuple(shape), dtype=dtype)
        if len(data) <= SMALL_BYTES:
            data = memoryview(bytearray(data))
        else:
            self._borrowed.append(weakref.ref(data))
        storage = torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, torch.Size(shape))

    def copy_in_use(self) -> None:
        """Copy, in a thread, the pages of all tensors that are still in use."""
        self._thread = threading.Thread(target=self._copy, name="borrowed pages", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when no page of a tensor is the slot's any more. The caller is the thread that changes tensors."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        self._left += [data for reference in self._borrowed if (data := reference()) is not None]
        for data in self._left:
            # To write what is there makes the kernel copy the pages. No other thread may write at this moment.
            torch.frombuffer(data, dtype=torch.uint8).bitwise_or_(0)
        self._left.clear()
        self._borrowed.clear()

    def _copy(self) -> None:
        while self._borrowed:
            data = self._borrowed[-1]()
            if data is not None and not self._is_copied(data):
                self._left.append(data)
            self._borrowed.pop()

    def _is_copied(self, data: memoryview) -> bool:
        begin = ctypes.addressof(ctypes.c_char.from_buffer(data))
        starts = range(0, len(data), CHUNK_BYTES)
        return all(self._touch(begin + start, min(CHUNK_BYTES, len(data) - start)) for start in starts)
