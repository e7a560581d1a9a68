"""Network links and streams, and what becomes of a call between two agents.

Messages are delayed and some are duplicated; a lost message ends its stream, as TCP would. A cut blocks one direction
of one link. Cuts are counted, so two cuts need two heals. A cut loses no message: a sent message waits in the kernel
and arrives after the heal, unless an endpoint has closed the stream meanwhile. Messages of one stream keep their order;
messages of different streams may overtake each other.

Agents call each other about copies: offers, reports and decisions. An agent calls again until it is answered. A call
that was answered too late for its caller has been made nevertheless, and one that the network keeps for long arrives
when nobody waits for it any more.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from muster.simulator.environment.schedule import Schedule

COORDINATOR = "coordinator"
"""The host on which the coordinator and slurmctld run."""
_RETRANSMIT_S = 0.2
"""Seconds within which TCP sends a waiting message again after a heal."""


@dataclass(frozen=True, slots=True)
class NetworkConditions:
    """Probabilities for each message, and delays in seconds.

    `loss_rate`: the message is lost and its stream ends. `duplicate_rate`: the message arrives twice. `delay_rate`: the
    message takes up to `max_delay_s` instead of `latency_s`.
    """

    loss_rate: float = 0.0
    duplicate_rate: float = 0.0
    delay_rate: float = 0.0
    latency_s: float = 0.004
    max_delay_s: float = 0.6


class StreamEnd:
    """The last message of one direction of a stream: the other endpoint's kernel has closed the connection."""


STREAM_END = StreamEnd()


class Network:
    """Which host reaches which other host, and how long a message takes."""

    def __init__(self, schedule: Schedule, rng: random.Random, conditions: NetworkConditions) -> None:
        self.schedule = schedule
        self.rng = rng
        self.conditions = conditions
        self.cuts: dict[tuple[str, str], int] = {}
        self._waiting: list[Pipe] = []

    def cut(self, src: str, dst: str) -> None:
        """Block all messages from `src` to `dst`."""
        self.cuts[src, dst] = self.cuts.get((src, dst), 0) + 1

    def heal(self, src: str, dst: str) -> None:
        """Remove one cut."""
        left = self.cuts.pop((src, dst)) - 1
        if left:
            self.cuts[src, dst] = left

    def passes(self, src: str, dst: str) -> bool:
        """True if messages go from `src` to `dst`."""
        return not self.cuts or (src, dst) not in self.cuts

    def connected(self, a: str, b: str) -> bool:
        """True if messages go both ways between `a` and `b`."""
        return not self.cuts or ((a, b) not in self.cuts and (b, a) not in self.cuts)

    def message_delay_s(self) -> float:
        """How long one message takes, in seconds."""
        conditions, rng = self.conditions, self.rng
        if conditions.delay_rate and rng.random() < conditions.delay_rate:
            return conditions.max_delay_s * rng.random()
        return conditions.latency_s * (0.5 + 0.5 * rng.random())

    def add_waiting(self, pipe: Pipe) -> None:
        """Remember a pipe that can't deliver now. `retry_waiting` tries it again."""
        self._waiting.append(pipe)

    def retry_waiting(self) -> None:
        """Links or processes have changed: every waiting pipe tries again soon."""
        waiting, self._waiting = self._waiting, []
        for pipe in waiting:
            self.schedule.call_later(_RETRANSMIT_S * self.rng.random(), pipe.resume)


class Pipe:
    """One direction of a stream.

    Args:
        ready: returns True while the receiving process takes messages.
        deliver: is called with each message. The last message is STREAM_END.
    """

    __slots__ = ("_deliver", "_dst", "_last", "_network", "_queue", "_ready", "_src", "closed", "on_loss")

    def __init__(
        self, network: Network, src: str, dst: str, ready: Callable[[], bool], deliver: Callable[[Any], None]
    ) -> None:
        self.closed = False
        self.on_loss: Callable[[], None] | None = None
        self._network, self._src, self._dst = network, src, dst
        self._ready, self._deliver = ready, deliver
        self._last = 0.0
        self._queue: deque[Any] = deque()

    def send(self, message: Any) -> None:
        """Send one message."""
        if self.closed:
            return
        network = self._network
        conditions = network.conditions
        if (
            conditions.loss_rate
            and self.on_loss
            and message is not STREAM_END
            and network.rng.random() < conditions.loss_rate
        ):
            self.on_loss()
            return
        self._transmit(message)
        if conditions.duplicate_rate and message is not STREAM_END and network.rng.random() < conditions.duplicate_rate:
            self._transmit(message)

    def _transmit(self, message: Any) -> None:
        schedule = self._network.schedule
        self._last = max(self._last, schedule.now + self._network.message_delay_s())
        schedule.call_at(self._last, self._arrive, message)

    def _arrive(self, message: Any) -> None:
        if self.closed:
            return
        if self._queue or not self._can_deliver():
            if not self._queue:
                self._network.add_waiting(self)
            self._queue.append(message)
        else:
            self._deliver(message)

    def resume(self) -> None:
        """Deliver the waiting messages, until one can't be delivered."""
        while self._queue and not self.closed:
            if not self._can_deliver():
                self._network.add_waiting(self)
                return
            self._deliver(self._queue.popleft())

    def _can_deliver(self) -> bool:
        return self._network.passes(self._src, self._dst) and self._ready()


class Stream:
    """One connection from a process on a node to the coordinator.

    Args:
        key: names the process.
        node_side: of the process on the node: whether it takes messages now, and what receives them.
        coordinator_side: the same for the coordinator.
    """

    __slots__ = ("down", "key", "last_order", "up")

    def __init__(
        self,
        network: Network,
        node: str,
        key: Any,
        node_side: tuple[Callable[[], bool], Callable[[Stream, Any], None]],
        coordinator_side: tuple[Callable[[], bool], Callable[[Stream, Any], None]],
    ) -> None:
        self.key = key
        self.last_order: Any = None
        self.up = Pipe(
            network, node, COORDINATOR, coordinator_side[0], lambda message: coordinator_side[1](self, message)
        )
        self.down = Pipe(network, COORDINATOR, node, node_side[0], lambda message: node_side[1](self, message))
        self.up.on_loss = self.down.on_loss = self.reset

    def reset(self) -> None:
        """The connection is lost: both endpoints receive STREAM_END."""
        self.up.send(STREAM_END)
        self.down.send(STREAM_END)

    def close_node_side(self) -> None:
        """The process on the node, or its kernel, closes the connection."""
        self.down.closed = True
        self.up.send(STREAM_END)

    def close_coordinator_side(self) -> None:
        """The coordinator, or its kernel, closes the connection."""
        self.up.closed = True
        self.down.send(STREAM_END)


@dataclass(frozen=True, slots=True)
class PeerCallConditions:
    """Probabilities for each call.

    `lost_rate`: it never arrives. `unanswered_rate`: it arrives, and the answer is lost. `late_rate`: it arrives up to
    `longest_s` seconds later. `doubled_rate`: it arrives at once, and once more up to `longest_s` seconds later.
    """

    lost_rate: float = 0.0
    unanswered_rate: float = 0.0
    late_rate: float = 0.0
    doubled_rate: float = 0.0
    longest_s: float = 4.0


RELIABLE = PeerCallConditions()


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one call. `late_s`, `again_s`: seconds until it arrives, and arrives again; `again_s` 0: once."""

    arrives: bool = True
    answered: bool = True
    late_s: float = 0.0
    again_s: float = 0.0


class PeerCalls:
    """Draws the fate of each call. Conditions that lose nothing draw nothing."""

    def __init__(self, conditions: PeerCallConditions, rng: random.Random) -> None:
        self._conditions = conditions
        self._rng = rng

    def draw(self) -> Fate:
        """The fate of the next call."""
        conditions, rng = self._conditions, self._rng
        if conditions is RELIABLE:
            return Fate()
        return Fate(
            arrives=rng.random() >= conditions.lost_rate,
            answered=rng.random() >= conditions.unanswered_rate,
            late_s=conditions.longest_s * rng.random() if rng.random() < conditions.late_rate else 0.0,
            again_s=conditions.longest_s * rng.random() if rng.random() < conditions.doubled_rate else 0.0,
        )
