"""Which host could reach which agent, in truth. It follows what a witness may rightly have reported about a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.simulator.environment.network import COORDINATOR

if TYPE_CHECKING:
    from muster.simulator.world.world import World

WITNESS_WINDOW_S = 3.0
"""Seconds. A witness that was unable to reach a node at some moment of this window may rightly report the node
silent."""


class Reachability:
    """For each host and agent: since when the host is unable to reach the agent, and until when it was.

    `changed_at`: the last change of links, kernels or processes. `coordinator_since`: the coordinator's last start.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._unreachable_since: dict[tuple[str, str, str], float] = {}
        self._unreachable_until: dict[tuple[str, str, str], float] = {}
        self.changed_at = world.schedule.now
        self.coordinator_since = world.schedule.now

    def coordinator_restarted(self) -> None:
        """A coordinator has started."""
        self.coordinator_since = self._world.schedule.now

    def topology_changed(self) -> None:
        """Links, kernels or processes have changed."""
        world, now = self._world, self._world.schedule.now
        self.changed_at = now
        for (gang, node), agent in world.agents.items():
            for src in (COORDINATOR, *world.machines):
                key = (src, gang, node)
                if world.reachability(src, node, gang) is None and agent.alive:
                    if key in self._unreachable_since:
                        del self._unreachable_since[key]
                        self._unreachable_until[key] = now
                else:
                    self._unreachable_since.setdefault(key, now)

    def was_unreachable(self, src: str, gang: str, node: str, within_s: float = WITNESS_WINDOW_S) -> bool:
        """True if `src` was unable to reach the gang's agent on `node` at some moment of the last `within_s`
        seconds."""
        key = (src, gang, node)
        agent = self._world.agents.get((gang, node))
        if key in self._unreachable_since or agent is None or not agent.alive:
            return True
        return self._world.schedule.now - self._unreachable_until.get(key, 0.0) < within_s

    def unreachable_since(self, src: str, gang: str, node: str) -> float | None:
        """The time since which `src` is unable to reach the gang's agent on `node`. None: `src` reaches it."""
        return self._unreachable_since.get((src, gang, node))
