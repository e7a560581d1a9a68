"""Which steps the coordinator was told of, and when: on that it waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.state.events import Status

if TYPE_CHECKING:
    from muster.simulator.world.world import World


class Progress:
    """The newest step of each gang that any status has named, and when one did first."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._newest: dict[str, tuple[tuple[int, int], float]] = {}

    def status_received(self, gang: str, status: Status) -> None:
        """The coordinator hears an agent's status."""
        newest = max(((rank.generation, rank.step) for rank in status.ranks if rank.progressed), default=(0, 0))
        if newest > self._newest.get(gang, ((0, 0), 0.0))[0]:
            self._newest[gang] = (newest, self._world.schedule.now)

    def reported_at(self, gang: str) -> float:
        """When the coordinator was told of a new step last; 0.0: never."""
        return self._newest.get(gang, ((0, 0), 0.0))[1]
