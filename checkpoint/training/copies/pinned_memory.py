"""Pinned slots: a GPU copies straight into them, at the rate of its bus.

Into other memory the driver copies piece by piece through a small buffer of its own, which takes three times as long
(an H200 on PCIe 5: 17 and 55 GB/s).
"""

import logging
from contextlib import suppress

import torch

_PORTABLE = 1
"""cudaHostRegisterPortable: the memory is pinned for all GPUs of this process."""
log = logging.getLogger(__name__)


class PinnedMemory:
    """The slots of one plan, as tensors of bytes. Nothing is pinned before `pin`."""

    def __init__(self, slots: list[torch.Tensor]) -> None:
        self._slots = slots
        self._pinned: list[torch.Tensor] = []
        self._tried = False

    def pin(self) -> bool:
        """Pin all slots, the first time. Takes 0.04 s for each GiB. Returns whether they are pinned.

        The memory must be mapped until `close`.
        """
        if not self._tried:
            self._tried = True
            for slot in self._slots:
                if refused := _register(slot):
                    log.warning("the GPU's driver can't pin a slot (%s): snapshots take longer", refused)
                    break
                self._pinned.append(slot)
        return len(self._pinned) == len(self._slots)

    def close(self) -> None:
        """Give the memory back to the driver, before it is unmapped."""
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop().data_ptr())


def _register(slot: torch.Tensor) -> str:
    """Pin one slot. Returns why it can't be pinned; empty if it is."""
    library = torch.cuda.cudart()
    code = library.cudaHostRegister(slot.data_ptr(), slot.numel(), _PORTABLE)
    if int(code) == 0:
        return ""
    with suppress(RuntimeError):  # CUDA keeps the error: without this, the user's next kernel would report it
        torch.zeros(1, device="cuda")
    return str(library.cudaGetErrorString(code))
