"""Which steps the coordinator was told of, and when. The core's timeouts start from these reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.state.events import AgentStatus

if TYPE_CHECKING:
    from muster.simulator.world.world import World


class Progress:
    """The newest step of each gang that any status has named, and the time at which a status first named it.

    The status with which an agent attaches proves no progress: the agent may have finished the step long before, while
    it had no stream.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._newest: dict[str, tuple[tuple[int, int], float]] = {}
        self._known_by_attaching: dict[str, tuple[int, int]] = {}
        self._proven_at: dict[str, float] = {}

    def status_received(self, gang: str, status: AgentStatus) -> None:
        """The coordinator receives an agent's status."""
        newest = _newest_step(status)
        if newest > self._newest.get(gang, ((0, 0), 0.0))[0]:
            self._newest[gang] = (newest, self._world.schedule.now)
            if newest > self._known_by_attaching.get(gang, (0, 0)):
                self._proven_at[gang] = self._world.schedule.now

    def agent_attached(self, gang: str, status: AgentStatus) -> None:
        """The coordinator receives the status with which an agent attaches."""
        self._known_by_attaching[gang] = max(self._known_by_attaching.get(gang, (0, 0)), _newest_step(status))

    def reported_at(self, gang: str) -> float:
        """The time at which the coordinator was last told of a new step. 0.0: never."""
        return self._newest.get(gang, ((0, 0), 0.0))[1]

    def proven_at(self, gang: str) -> float:
        """The time at which a step was last reported that no agent had named when it attached. 0.0: never."""
        return self._proven_at.get(gang, 0.0)


def _newest_step(status: AgentStatus) -> tuple[int, int]:
    return max(((rank.generation, rank.step) for rank in status.ranks if rank.progressed), default=(0, 0))
