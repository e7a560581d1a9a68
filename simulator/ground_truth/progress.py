"""Which steps the coordinator was told of, and when. The core's timeouts start from these reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.state.events import AgentStatus

if TYPE_CHECKING:
    from muster.simulator.world.world import World


class Progress:
    """The newest step of each gang that any status has named, and the time at which a status first named it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._newest: dict[str, tuple[tuple[int, int], float]] = {}

    def status_received(self, gang: str, status: AgentStatus) -> None:
        """The coordinator receives an agent's status."""
        newest = max(((rank.generation, rank.step) for rank in status.ranks if rank.progressed), default=(0, 0))
        if newest > self._newest.get(gang, ((0, 0), 0.0))[0]:
            self._newest[gang] = (newest, self._world.schedule.now)

    def reported_at(self, gang: str) -> float:
        """The time at which the coordinator was last told of a new step. 0.0: never."""
        return self._newest.get(gang, ((0, 0), 0.0))[1]
