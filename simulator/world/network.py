"""Wires: messages are late, some are doubled; a lost one ends its stream, as TCP does. Cuts are one-way and counted.

A cut loses nothing by itself: what was sent waits in the kernel and arrives when the cut is mended, unless somebody has
given the stream up meanwhile. Streams overtake each other, messages of one stream never do.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from muster.simulator.world.schedule import Schedule

COORDINATOR = "coordinator"
"""The host of coordinator and slurmctld."""
_RETRANSMIT_S = 0.2


@dataclass(frozen=True, slots=True)
class Weather:
    """Chances of a message to be lost (its stream ends), doubled, and delayed by up to `late_s` instead of `hop_s`."""

    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    hop_s: float = 0.004
    late_s: float = 0.6


class End:
    """The last message of a stream's direction: the other kernel has closed it."""


END = End()


class Network:
    """Who reaches whom."""

    def __init__(self, schedule: Schedule, chance: random.Random, weather: Weather) -> None:
        self.schedule = schedule
        self.chance = chance
        self.weather = weather
        self.cuts: dict[tuple[str, str], int] = {}
        self._stuck: list[Pipe] = []

    def cut(self, src: str, dst: str) -> None:
        """Nothing goes from `src` to `dst` any more."""
        self.cuts[src, dst] = self.cuts.get((src, dst), 0) + 1

    def mend(self, src: str, dst: str) -> None:
        """Take one cut back."""
        left = self.cuts.pop((src, dst)) - 1
        if left:
            self.cuts[src, dst] = left

    def up(self, src: str, dst: str) -> bool:
        """Messages go from `src` to `dst`."""
        return not self.cuts or (src, dst) not in self.cuts

    def both(self, a: str, b: str) -> bool:
        """Messages go both ways."""
        return not self.cuts or ((a, b) not in self.cuts and (b, a) not in self.cuts)

    def delay(self) -> float:
        """Seconds that one message is under way."""
        weather, chance = self.weather, self.chance
        if weather.late and chance.random() < weather.late:
            return weather.late_s * chance.random()
        return weather.hop_s * (0.5 + 0.5 * chance.random())

    def stall(self, pipe: Pipe) -> None:
        """Remember who waits for `changed`."""
        self._stuck.append(pipe)

    def changed(self) -> None:
        """Wires or processes have changed: whatever waits is sent again soon."""
        stuck, self._stuck = self._stuck, []
        for pipe in stuck:
            self.schedule.later(_RETRANSMIT_S * self.chance.random(), pipe.resume)


class Pipe:
    """One direction of a stream. `ready`: the receiving process takes messages now; `take` gets them, END the last."""

    __slots__ = ("_dst", "_last", "_net", "_queue", "_ready", "_src", "_take", "closed", "lost")

    def __init__(
        self, net: Network, src: str, dst: str, ready: Callable[[], bool], take: Callable[[Any], None]
    ) -> None:
        self.closed = False
        self.lost: Callable[[], None] | None = None
        self._net, self._src, self._dst = net, src, dst
        self._ready, self._take = ready, take
        self._last = 0.0
        self._queue: deque[Any] = deque()

    def put(self, message: Any) -> None:
        """Send."""
        if self.closed:
            return
        net = self._net
        weather = net.weather
        if weather.lost and self.lost and message is not END and net.chance.random() < weather.lost:
            self.lost()
            return
        self._send(message)
        if weather.doubled and message is not END and net.chance.random() < weather.doubled:
            self._send(message)

    def _send(self, message: Any) -> None:
        schedule = self._net.schedule
        self._last = max(self._last, schedule.now + self._net.delay())
        schedule.at(self._last, self._arrive, message)

    def _arrive(self, message: Any) -> None:
        if self.closed:
            return
        if self._queue or not self._passes():
            if not self._queue:
                self._net.stall(self)
            self._queue.append(message)
        else:
            self._take(message)

    def resume(self) -> None:
        """Deliver what waits, as far as that goes now."""
        while self._queue and not self.closed:
            if not self._passes():
                self._net.stall(self)
                return
            self._take(self._queue.popleft())

    def _passes(self) -> bool:
        return self._net.up(self._src, self._dst) and self._ready()


class Stream:
    """One connection of a process on `node` to the coordinator; `key` says whose. `near` takes what comes down there,
    `far` what comes up to the coordinator."""

    __slots__ = ("down", "key", "last_order", "up")

    def __init__(
        self,
        net: Network,
        node: str,
        key: Any,
        near: tuple[Callable[[], bool], Callable[[Stream, Any], None]],
        far: tuple[Callable[[], bool], Callable[[Stream, Any], None]],
    ) -> None:
        self.key = key
        self.last_order: Any = None
        self.up = Pipe(net, node, COORDINATOR, far[0], lambda message: far[1](self, message))
        self.down = Pipe(net, COORDINATOR, node, near[0], lambda message: near[1](self, message))
        self.up.lost = self.down.lost = self.reset

    def reset(self) -> None:
        """Both ends are told that it is over."""
        self.up.put(END)
        self.down.put(END)

    def close_near(self) -> None:
        """The process on the node, whose kernel lives, has closed its end."""
        self.down.closed = True
        self.up.put(END)

    def close_far(self) -> None:
        """The coordinator, or its kernel, has closed its end."""
        self.up.closed = True
        self.down.put(END)
