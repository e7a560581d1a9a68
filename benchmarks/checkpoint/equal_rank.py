"""A rank without torch. In data parallelism all ranks write equal bytes, and an object each of their own; ranks of a
sharded state write bytes of their own only.

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
    """One of `world_size` ranks that share `size` bytes, or have as many each (`differs`)."""

    def __init__(self, rank: int, world_size: int, size: int, differs: bool = False) -> None:
        self._rank, self._world_size, self._size = rank, world_size, size
        self._mark = (rank + 1).to_bytes(8, "little") if differs else bytes(8)
        self._joined: TorchlessRank | None = None

    def is_up(self) -> bool:
        """Whether this process has started and imported all that it needs: it has, if it answers."""
        return True

    def attach(self, generation: int, descriptor: int) -> None:
        """Connect to the agent, and get slots."""
        rank = TorchlessRank(AgentConnection(descriptor, self._rank, generation), self._rank, self._world_size)
        self._start = rank.join()
        self._joined_at = time.monotonic()
        if refused := rank.layout(self._size):
            raise RuntimeError(refused)
        self._joined = rank

    def restore(self, generation: int, step: int, descriptor: int) -> float:
        """Connect to the agent. Returns the moment (time.monotonic) when the verified state of `step` could be mapped.

        Raises:
            RuntimeError: another state has come.
        """
        self.attach(generation, descriptor)
        shard = self._start.shard
        for start in range(0, self._size, PIECE_BYTES):
            if shard is None or shard[start : start + 16] != self._begin_of(step, start):
                raise RuntimeError(f"rank {self._rank} has another state than that of step {step} at byte {start}")
        return self._joined_at

    def _begin_of(self, step: int, start: int) -> bytes:
        """The first bytes of the piece at `start`."""
        return (step << 32 | start // PIECE_BYTES).to_bytes(8, "little") + self._mark

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
                piece[:16] = self._begin_of(step, start)
                part = memoryview(piece)[: min(PIECE_BYTES, self._size - start)]
                rank.connection.slots[slot][start : start + len(part)] = part
                part.release()
        rank.write(slot, b"", b"rank %d, step %d" % (self._rank, step))
        rank.connection.report_filled(slot, step)
        return time.monotonic()
