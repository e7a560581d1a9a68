"""One node and its processes.

A process can be stopped (SIGSTOP) or end; a stopped process does nothing until it resumes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from muster.simulator.environment.schedule import Schedule


@dataclass(slots=True, eq=False)
class Machine:
    """A node of the simulated cluster.

    `powered`: the kernel runs and answers. `frozen`: the kernel answers, and no process runs. `boot_count`: starts of
    the kernel. `ranks_unkillable_until`: until this time a driver holds the ranks, so SIGKILL has no effect.
    `has_hardware_fault`: a sensor has reported a fatal signal. `has_precursor`: a sensor has reported a precursor that
    the node is to be left for. `daemon_port_exhausted`: strangers hold all connections
    that the node daemon's port allows.
    """

    name: str
    leaf: str
    powered: bool = True
    frozen: bool = False
    boot_count: int = 1
    ranks_unkillable_until: float = 0.0
    has_hardware_fault: bool = False
    has_precursor: bool = False
    has_slow_rank: bool = False
    """A rank on it is slower than all others of its gang."""
    has_flipped_bit: bool = False
    """A bit of a rank's state has flipped on it."""
    daemon_port_exhausted: bool = False
    ended_signals: set[str] = field(default_factory=set)
    """Signals whose end the present node daemon has reported."""
    check_outcome: str = "passed"
    """What a node check finds."""
    crashes_ranks_after: int | None = None
    """It is broken in a way that no sensor sees: its ranks crash after so many steps of a generation. None: it is
    not."""
    has_imported: bool = True
    """Zygotes of a new agent have imported what ranks need."""


class Process:
    """A process on a machine. `machine` is None for a process on the coordinator's host."""

    def __init__(self, schedule: Schedule, machine: Machine | None) -> None:
        self.schedule = schedule
        self.machine = machine
        self.alive = True
        self.stopped = False
        self._deferred: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def is_running(self) -> bool:
        """The process executes code: it is alive and not stopped, and its node is powered and not frozen."""
        machine = self.machine
        return self.alive and not self.stopped and (machine is None or (machine.powered and not machine.frozen))

    def call_later(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        """Call `action(*args)` in `delay` seconds, or when the process resumes after that.

        Never call it after the process has ended.
        """
        schedule = self.schedule
        schedule.call_at(schedule.now + delay, self._run, action, args)

    def resume(self) -> None:
        """The process is no longer stopped. Actions that were due meanwhile run now."""
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
    """Waits between attempts. Each wait is twice the one before, up to `max_s` seconds."""

    first_s: float
    max_s: float
    _next_s: float = field(default=0.0)

    def __post_init__(self) -> None:
        self._next_s = self.first_s

    def next_delay_s(self) -> float:
        """The next wait, in seconds."""
        pause, self._next_s = self._next_s, min(2 * self._next_s, self.max_s)
        return pause

    def reset(self) -> None:
        """An attempt succeeded: start again with the first wait."""
        self._next_s = self.first_s
