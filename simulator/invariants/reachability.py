"""Who could see whom, in truth: what a witness may have said of a node follows from that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.simulator.world.network import COORDINATOR

if TYPE_CHECKING:
    from muster.simulator.world.world import World

BLIND_S = 3.0
"""A witness that did not reach a node at some moment of this long may have said so."""


class Reach:
    """Who has been blind for whom, and since when all is as it is.

    `disturbed_at`: wires, kernels or processes have changed last; `coordinator_since`: the coordinator's last start.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._blind_since: dict[tuple[str, str, str], float] = {}
        self._blind_until: dict[tuple[str, str, str], float] = {}
        self.disturbed_at = world.schedule.now
        self.coordinator_since = world.schedule.now

    def restarted(self) -> None:
        """A coordinator has started."""
        self.coordinator_since = self._world.schedule.now

    def changed(self) -> None:
        """Wires, kernels or processes have changed."""
        world, now = self._world, self._world.schedule.now
        self.disturbed_at = now
        for (gang, node), agent in world.agents.items():
            for src in (COORDINATOR, *world.machines):
                key = (src, gang, node)
                if world.door(src, node, gang) is None and agent.alive:
                    if key in self._blind_since:
                        del self._blind_since[key]
                        self._blind_until[key] = now
                else:
                    self._blind_since.setdefault(key, now)

    def blind(self, src: str, gang: str, node: str, within_s: float = BLIND_S) -> bool:
        """`src` did not reach the gang's agent on `node` at some moment of late."""
        key = (src, gang, node)
        agent = self._world.agents.get((gang, node))
        if key in self._blind_since or agent is None or not agent.alive:
            return True
        return self._world.schedule.now - self._blind_until.get(key, 0.0) < within_s

    def blind_since(self, src: str, gang: str, node: str) -> float | None:
        """Since when `src` has not reached the gang's agent on `node`; None: it reaches it."""
        return self._blind_since.get((src, gang, node))
