"""A node daemon: attaches, sends heartbeats, and keeps each signal until the coordinator confirms it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from muster.daemon.coordinator.core.state import events
from muster.simulator.environment.machine import Backoff, Machine, Process
from muster.simulator.environment.network import COORDINATOR, STREAM_END, Stream

if TYPE_CHECKING:
    from muster.simulator.world.world import World

HEARTBEAT_INTERVAL_S, ANSWER_TIMEOUT_S = 5.0, 5.0
"""Seconds between two heartbeats, and seconds that the answer may take."""


class NodeDaemon(Process):
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
        self._last_message_at = 0.0
        self._heartbeat_series = 0
        self._requested_check = ""
        self._checked: tuple[str, events.NodeCheck] | None = None

    def attach(self) -> None:
        """Open a stream. Retry until it is open."""
        if self.stream is not None:
            return
        coordinator, node = self._world.coordinator, self.machine.name
        if not coordinator.listens() or not self._world.network.connected(node, COORDINATOR):
            self._reconnect_later()
            return
        self.stream = stream = Stream(
            self._world.network, node, (node, self.incarnation),
            (self.is_running, self._receive), (coordinator.is_running, coordinator.receive_from_daemon),
        )  # fmt: skip
        self._last_message_at = self.schedule.now
        stream.up.send(("hello", self))
        for signal in self._signals:
            stream.up.send(("signal", signal))
        self._heartbeat_series += 1
        self.call_later(HEARTBEAT_INTERVAL_S, self._send_heartbeat, self._heartbeat_series)

    def _reconnect_later(self) -> None:
        self.call_later(self._backoff.next_delay_s() * (0.5 + 0.5 * self._world.rng.random()), self.attach)

    def _receive(self, stream: Stream, message: Any) -> None:
        if stream is not self.stream:
            return
        if message is STREAM_END or message[0] < self._term:
            self._disconnect()
            return
        self._term, kind, content = message
        self._last_message_at = self.schedule.now
        self._backoff.reset()
        if kind == "check":
            self._start_check(content)
        elif content in self._signals:
            self._signals.remove(content)

    def _start_check(self, request: str) -> None:
        """The coordinator asks for a check; empty: for none."""
        if request and request != self._requested_check:
            self.call_later(self._world.durations.check_s(), self._end_check, request)
        self._requested_check = request or self._requested_check

    def _end_check(self, request: str) -> None:
        outcome = self.machine.check_outcome
        self._world.note(f"musterd checks {self.machine.name}: {outcome}")
        self._world.observer.node_checked(self.machine.name, outcome)
        self._checked = (request, events.NodeCheck(events.CheckOutcome(outcome), gflops=1.0))

    def _disconnect(self) -> None:
        if self.stream is not None:
            self.stream.down.closed = True
            self.stream.close_node_side()
            self.stream = None
            self._reconnect_later()

    def _send_heartbeat(self, number: int) -> None:
        if number != self._heartbeat_series or self.stream is None:
            return
        if self.schedule.now - self._last_message_at > HEARTBEAT_INTERVAL_S + ANSWER_TIMEOUT_S:
            self._disconnect()
            return
        self.stream.up.send(("heartbeat", self._checked))
        self.call_later(HEARTBEAT_INTERVAL_S, self._send_heartbeat, number)

    def report_signal(self, event: events.NodeSignalled) -> None:
        """A sensor has seen a hardware signal."""
        self._signals.append(event)
        if self.stream is not None:
            self.stream.up.send(("signal", event))

    def end(self, closes: bool) -> None:
        """The process has ended. `closes`: its kernel runs and closes its connections."""
        self.alive = False
        self.machine.ended_signals.clear()
        if self.stream is not None:
            self.stream.down.closed = True
            if closes:
                self.stream.close_node_side()
            self.stream = None
