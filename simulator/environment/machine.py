"""One node: a kernel, and processes that can be stopped or end. A stopped process does nothing until it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from muster.simulator.environment.schedule import Schedule


@dataclass(slots=True, eq=False)
class Machine:
    """A node of the simulated cluster.

    `powered`: the kernel runs and answers. `frozen`: no process runs, and the kernel answers. `ranks_unkillable_until`:
    until this time a driver holds the ranks, so SIGKILL has no effect. `has_hardware_fault`: a sensor has reported a
    fatal signal.
    """

    name: str
    leaf: str
    powered: bool = True
    frozen: bool = False
    boot_count: int = 1
    ranks_unkillable_until: float = 0.0
    has_hardware_fault: bool = False


class Process:
    """A process on a machine; with `machine` None, on the coordinator's host."""

    def __init__(self, schedule: Schedule, machine: Machine | None) -> None:
        self.schedule = schedule
        self.machine = machine
        self.alive = True
        self.stopped = False
        self._deferred: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def is_running(self) -> bool:
        """It runs."""
        machine = self.machine
        return self.alive and not self.stopped and (machine is None or (machine.powered and not machine.frozen))

    def call_later(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        """Call `action(*args)` in `delay` seconds, or when the process goes on after that; never once it has ended."""
        schedule = self.schedule
        schedule.call_at(schedule.now + delay, self._run, action, args)

    def resume(self) -> None:
        """It is no longer stopped: what was due meanwhile happens now."""
        deferred, self._deferred = self._deferred, []
        for action, args in deferred:
            self.schedule.call_later(0.0, self._run, action, args)

    def _run(self, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.is_running():
            action(*args)
        elif self.alive:
            self._deferred.append((action, args))


@dataclass(slots=True)
class Backoff:
    """Pauses between tries, doubling."""

    first_s: float
    max_s: float
    _next_s: float = field(default=0.0)

    def __post_init__(self) -> None:
        self._next_s = self.first_s

    def next_delay_s(self) -> float:
        """The next one, seconds."""
        pause, self._next_s = self._next_s, min(2 * self._next_s, self.max_s)
        return pause

    def reset(self) -> None:
        """It went well."""
        self._next_s = self.first_s
