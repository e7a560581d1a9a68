"""The floating-point operations of one step of this rank, as PyTorch counts them (torch.utils.flop_counter).

The second finished step is counted, once, because counting is slow: each operation passes through Python. What
torch.compile has compiled, and kernels of a script's own, PyTorch does not see.
"""

from __future__ import annotations

from torch.utils.flop_counter import FlopCounterMode


class FlopCount:
    """Counts the operations between two finished steps."""

    def __init__(self) -> None:
        self._mode: FlopCounterMode | None = None
        self.flops = 0.0
        """Of one step; 0: not counted yet."""

    @property
    def is_done(self) -> bool:
        """A step was counted."""
        return self.flops > 0

    def step_finished(self) -> bool:
        """A step is finished. Returns whether the next one is counted. A step without an operation counts for
        nothing."""
        if self._mode is not None:
            self.close()
        if self.is_done:
            return False
        self._mode = FlopCounterMode(display=False)
        self._mode.__enter__()
        return True

    def close(self) -> None:
        """Count no more."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self.flops = float(self._mode.get_total_flops())
        self._mode = None
