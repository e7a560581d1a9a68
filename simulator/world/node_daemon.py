"""A node's daemon: attaches, beats, and keeps signals until they are answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from muster.daemon.coordinator.core.state import events
from muster.simulator.world.machine import Backoff, Machine, Process
from muster.simulator.world.network import COORDINATOR, END, Stream

if TYPE_CHECKING:
    from muster.simulator.world.world import World

HEARTBEAT_S, ANSWER_S = 5.0, 5.0


class Daemon(Process):
    """One life of musterd on a machine."""

    machine: Machine

    def __init__(self, world: World, machine: Machine, incarnation: str) -> None:
        super().__init__(world.schedule, machine)
        self.machine = machine
        self.incarnation = incarnation
        self.stream: Stream | None = None
        self._world = world
        self._backoff = Backoff(0.1, 2.0)
        self._signals: list[events.NodeSignalled] = []
        self._term = 0
        self._heard_at = 0.0
        self._beats = 0

    def attach(self) -> None:
        """Open a stream, again and again until there is one."""
        if self.stream is not None:
            return
        coordinator, node = self._world.coordinator, self.machine.name
        if not coordinator.listens() or not self._world.network.both(node, COORDINATOR):
            self._again()
            return
        self.stream = stream = Stream(
            self._world.network, node, (node, self.incarnation),
            (self.awake, self._hear), (coordinator.awake, coordinator.hear_daemon),
        )  # fmt: skip
        self._heard_at = self.schedule.now
        stream.up.put(("hello", self))
        for signal in self._signals:
            stream.up.put(("signal", signal))
        self._beats += 1
        self.later(HEARTBEAT_S, self._beat, self._beats)

    def _again(self) -> None:
        self.later(self._backoff.pause() * (0.5 + 0.5 * self._world.chance.random()), self.attach)

    def _hear(self, stream: Stream, message: Any) -> None:
        if stream is not self.stream:
            return
        if message is END or message[0] < self._term:
            self._lose()
            return
        self._term, _, signal = message
        self._heard_at = self.schedule.now
        self._backoff.reset()
        if signal in self._signals:
            self._signals.remove(signal)

    def _lose(self) -> None:
        if self.stream is not None:
            self.stream.down.closed = True
            self.stream.close_near()
            self.stream = None
            self._again()

    def _beat(self, number: int) -> None:
        if number != self._beats or self.stream is None:
            return
        if self.schedule.now - self._heard_at > HEARTBEAT_S + ANSWER_S:
            self._lose()
            return
        self.stream.up.put(("heartbeat", None))
        self.later(HEARTBEAT_S, self._beat, number)

    def signal(self, event: events.NodeSignalled) -> None:
        """The hardware has said something."""
        self._signals.append(event)
        if self.stream is not None:
            self.stream.up.put(("signal", event))

    def end(self, closes: bool) -> None:
        """The process is gone. `closes`: its kernel lives and closes its connections."""
        self.alive = False
        if self.stream is not None:
            self.stream.down.closed = True
            if closes:
                self.stream.close_near()
            self.stream = None
