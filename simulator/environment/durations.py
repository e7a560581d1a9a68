"""How long things take on the nodes. A seed samples each duration; a scenario uses constant durations."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Durations:
    """The longest duration of each kind, in seconds. The shortest is a tenth of it.

    `constant`: use half of the longest duration every time, and no random numbers.
    """

    step_s: float = 0.4
    boot_s: float = 1.5
    kill_s: float = 0.15
    store_s: float = 0.6
    copy_s: float = 0.2
    flush_s: float = 1.0
    launch_s: float = 1.5
    exit_s: float = 0.3
    stop_s: float = 1.0
    check_s: float = 4.0
    constant: bool = False


class DurationSampler:
    """Samples durations. All methods return seconds."""

    def __init__(self, durations: Durations, rng: random.Random) -> None:
        self._durations = durations
        self._rng = rng

    def _sample_s(self, longest: float) -> float:
        if self._durations.constant:
            return longest / 2
        return longest * (0.1 + 0.9 * self._rng.random())

    def step_s(self) -> float:
        """One step of the optimizer. It is the same for all ranks."""
        return self._durations.step_s

    def boot_s(self) -> float:
        """From the start of a rank's process until the rank loads its state."""
        return self._sample_s(self._durations.boot_s)

    def kill_s(self) -> float:
        """From SIGKILL until the process is gone."""
        return self._sample_s(self._durations.kill_s)

    def store_s(self) -> float:
        """Until the rendezvous store listens."""
        return self._sample_s(self._durations.store_s)

    def copy_s(self) -> float:
        """Copying a shard to the buddy."""
        return self._sample_s(self._durations.copy_s)

    def flush_s(self) -> float:
        """Writing one node's shards to durable storage."""
        return self._sample_s(self._durations.flush_s)

    def launch_s(self) -> float:
        """From the start of the job until an agent attaches."""
        return self._sample_s(self._durations.launch_s)

    def exit_s(self) -> float:
        """From the last step of a training until the rank's process is gone."""
        return self._sample_s(self._durations.exit_s)

    def stop_s(self) -> float:
        """From the last step of a rank that was asked to stop until its process is gone. A script may clean up."""
        return self._sample_s(self._durations.stop_s)

    def check_s(self) -> float:
        """A node check, with the import of PyTorch."""
        return self._sample_s(self._durations.check_s)
