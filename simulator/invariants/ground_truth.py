"""What is true in the simulated cluster, as opposed to what the core believes.

Which host could reach which agent: it follows what a witness may rightly have reported about a node. Which steps the
coordinator was told of, and when: the core's timeouts start from these reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.state.events import AgentStatus
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
