"""What this node knows of its own health, for callers on the node: Slurm's hooks and NVRx.

The coordinator decides, and each of its answers says what it holds of the node. While it does not answer, the node has
only its own word: a signal that the policy calls unfit counts from the moment it is seen until the coordinator has
answered a heartbeat after it. Then the coordinator's verdict counts, be it another one: a limit may have kept the node
in service.
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.daemon.node.sensors.sensor import Observation
from muster.node_health import OUT_OF_SERVICE, NodeHealth
from muster.v1 import memory_pb2, node_pb2

_MAY_RUN_JOBS = frozenset(NodeHealth) - OUT_OF_SERVICE


@dataclass(frozen=True, slots=True)
class Verdict:
    """`name`: FIT, UNFIT or another health of a node. `reason`: why, in words; can be empty. `own_word`: the
    coordinator has not judged it."""

    name: str = NodeHealth.FIT
    reason: str = ""
    own_word: bool = False

    @property
    def fit(self) -> bool:
        """Whether the node may run jobs."""
        return self.name in _MAY_RUN_JOBS

    def message(self) -> memory_pb2.NodeVerdict:
        """The verdict as a message."""
        return memory_pb2.NodeVerdict(fit=self.fit, verdict=self.name, reason=self.reason, own_word=self.own_word)


class OwnVerdict:
    """Takes in what the sensors see and what the coordinator answers. Not thread-safe, but `current` may be called from
    any thread."""

    def __init__(self) -> None:
        self._unfit: tuple[node_pb2.UnfitSignals, ...] = ()
        self._coordinators = Verdict(NodeHealth.FIT, "the coordinator has not answered yet")
        self._waiting: Observation | None = None
        """The signal that the policy calls unfit, and of which the coordinator's decision is not known."""
        self._confirmed = False

    def current(self) -> Verdict:
        """The verdict now."""
        waiting = self._waiting
        if waiting is None:
            return self._coordinators
        where = f" on {waiting.device}" if waiting.device else ""
        reason = f"{waiting.kind} {waiting.code}{where}; the coordinator has not answered yet"
        return Verdict(NodeHealth.UNFIT, reason, own_word=True)

    def observe(self, observation: Observation) -> None:
        """A sensor has seen a signal."""
        if any(_covers(signals, observation) for signals in self._unfit):
            self._waiting, self._confirmed = observation, False

    def take_answer(self, order: node_pb2.NodeOrder, answered: Observation | None, to_hello: bool = False) -> None:
        """The coordinator has answered: to that signal, or to hello or a heartbeat (None)."""
        if to_hello:
            self._unfit = tuple(order.unfit)
        if answered is not None:
            self._confirmed = self._confirmed or answered == self._waiting
            return
        self._coordinators = Verdict(order.verdict or NodeHealth.FIT, order.verdict_reason)
        if self._confirmed:
            self._waiting, self._confirmed = None, False


def _covers(signals: node_pb2.UnfitSignals, observation: Observation) -> bool:
    return signals.kind == observation.kind and (observation.code in signals.codes) != signals.all_but
