"""A rank of data parallelism without torch: all ranks write equal bytes, and an object each of their own.

Served by a `worker.Worker`.
"""

from __future__ import annotations

import mmap
import time

from muster.checkpoint.format.layout import PIECE_BYTES
from muster.checkpoint.testing.gang_in_one_process import TorchlessRank
from muster.checkpoint.training.agent_connection import AgentConnection

_SLOT_TIMEOUT_S = 60.0


class EqualRank:
    """One of `world_size` ranks that share `size` bytes."""

    def __init__(self, rank: int, world_size: int, size: int) -> None:
        self._rank, self._world_size, self._size = rank, world_size, size
        self._joined: TorchlessRank | None = None

    def attach(self, generation: int, descriptor: int) -> None:
        """Connect to the agent, and get slots."""
        rank = TorchlessRank(AgentConnection(descriptor, self._rank, generation), self._rank, self._world_size)
        rank.join()
        if refused := rank.layout(self._size):
            raise RuntimeError(refused)
        self._joined = rank

    def fill(self, step: int) -> float:
        """Write the state after `step` steps. Returns the moment (time.monotonic) when it was reported."""
        rank = self._joined
        assert rank is not None
        rank.connection.report_progress(step)
        slot = rank.connection.slot_for_any_step(step, _SLOT_TIMEOUT_S)
        if slot is None:
            raise RuntimeError(f"no slot for step {step}")
        with mmap.mmap(-1, PIECE_BYTES) as piece:
            for start in range(0, self._size, PIECE_BYTES):
                piece[:8] = (step << 32 | start // PIECE_BYTES).to_bytes(8, "little")
                part = memoryview(piece)[: min(PIECE_BYTES, self._size - start)]
                rank.connection.slots[slot][start : start + len(part)] = part
                part.release()
        rank.write(slot, b"", b"rank %d, step %d" % (self._rank, step))
        rank.connection.report_filled(slot, step)
        return time.monotonic()
