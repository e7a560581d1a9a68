"""One node: a kernel, and processes that can be stopped or end. A stopped process does nothing until it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from muster.simulator.world.schedule import Schedule


@dataclass(slots=True, eq=False)
class Machine:
    """A node. `kernel`: powered, its kernel answers; `frozen`: no process runs, the kernel answers. `stuck_until`:
    before, ranks can't be killed (a driver holds them). `faulty`: its hardware has once said something fatal."""

    name: str
    leaf: str
    kernel: bool = True
    frozen: bool = False
    boot: int = 1
    stuck_until: float = 0.0
    faulty: bool = False


class Process:
    """A process on a machine; with `machine` None, on the coordinator's host."""

    def __init__(self, schedule: Schedule, machine: Machine | None) -> None:
        self.schedule = schedule
        self.machine = machine
        self.alive = True
        self.stopped = False
        self._waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def awake(self) -> bool:
        """It runs."""
        machine = self.machine
        return self.alive and not self.stopped and (machine is None or (machine.kernel and not machine.frozen))

    def later(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        """Call `action(*args)` in `delay` seconds, or when the process goes on after that; never once it has ended."""
        schedule = self.schedule
        schedule.at(schedule.now + delay, self._run, action, args)

    def go_on(self) -> None:
        """It is no longer stopped: what was due meanwhile happens now."""
        waiting, self._waiting = self._waiting, []
        for action, args in waiting:
            self.schedule.later(0.0, self._run, action, args)

    def _run(self, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.awake():
            action(*args)
        elif self.alive:
            self._waiting.append((action, args))


@dataclass(slots=True)
class Backoff:
    """Pauses between tries, doubling."""

    first_s: float
    most_s: float
    _next: float = field(default=0.0)

    def __post_init__(self) -> None:
        self._next = self.first_s

    def pause(self) -> float:
        """The next one, seconds."""
        pause, self._next = self._next, min(2 * self._next, self.most_s)
        return pause

    def reset(self) -> None:
        """It went well."""
        self._next = self.first_s
