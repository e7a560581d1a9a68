"""Invariant 5: while many nodes are silent at once, none is evicted for a minute. A node whose daemon is heard is not
silent.

The same holds for many nodes on which ranks can't be killed: none of these nodes is the cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.detection.outage import STUCK_AFTER_S, is_daemon_heard
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.gang import Gang
from muster.daemon.coordinator.core.state.state_tables import FENCING, MONITORED
from muster.node_health import UNRESPONSIVE
from muster.simulator.coverage.reason_phrases import ReasonPhrase
from muster.simulator.environment.network import COORDINATOR
from muster.simulator.invariants.ground_truth import Reachability
from muster.simulator.invariants.node_health import gang_watching
from muster.simulator.world.observer import require

if TYPE_CHECKING:
    from muster.simulator.world.world import World

OUTAGE_HOLD_S = 60.0
"""Seconds for which an outage of many nodes is waited out."""
MANY_WINDOW_S = 10.0
"""Seconds. A node that was called silent within this time counts towards "many"."""


class OutageInvariant:
    """When each node was called silent, which nodes are out of which gang, and when each gang was last fenced."""

    def __init__(self, world: World, reachability: Reachability) -> None:
        self._world = world
        self._reachability = reachability
        self._silent_at: dict[str, float] = {}
        self._fenced_at: dict[str, float] = {}
        self._out: set[tuple[str, str]] = set()

    def generation_fenced(self, gang: str, at: float) -> None:
        """A gang's ranks shall end."""
        self._fenced_at[gang] = at

    def member_joined(self, gang: str, node: str) -> None:
        """A node belongs to a gang."""
        self._out.discard((gang, node))

    def member_out(self, gang: str, node: str) -> None:
        """A gang removes a node and continues without it."""
        self._out.add((gang, node))

    def check_health_change(self, core: Core, fact: facts.NodeJudged, at: float) -> None:
        """The core changes a node's health."""
        if fact.health in UNRESPONSIVE:
            gang = gang_watching(core.state, fact.node)
            if gang is not None:
                self._check_silent(core, gang, fact, at)
            self._silent_at[fact.node] = at
        else:
            self._silent_at.pop(fact.node, None)

    def check_drain(self, core: Core, call: facts.SlurmCallOwed, at: float) -> None:
        """Slurm shall drain a node."""
        if ReasonPhrase.RANKS_UNKILLABLE in call.text:
            self._check_unkillable(core, call, at)

    def _check_unkillable(self, core: Core, fact: facts.SlurmCallOwed, at: float) -> None:
        known_nodes, gangs = len(core.state.nodes), core.state.gangs
        waited_s = max(at - self._fenced_at.get(g.id, at) for g in gangs.values() if fact.node in g.roster.members)
        unkillable = {fact.node}
        for (id, node), agent in self._world.agents.items():
            is_present = id in gangs and node in gangs[id].roster.members and (id, node) not in self._out
            reached = agent.is_running() and not self._reachability.was_unreachable(COORDINATOR, id, node)
            # The coordinator is not told of ranks that exit by themselves, and killing a rank may take this long.
            late = is_present and gangs[id].phase in FENCING and at - self._fenced_at.get(id, at) > STUCK_AFTER_S
            if late and reached:
                unkillable |= {node for rank in agent.ranks.values() if rank.alive and rank.kill_sent}
        require(
            len(unkillable) <= max(2, known_nodes // 10) or waited_s >= OUTAGE_HOLD_S,
            f"invariant 5: {fact.node} is drained after {waited_s:.1f} s, and ranks on {sorted(unkillable)} can't "
            f"be killed",
        )

    def _check_silent(self, core: Core, gang: Gang, fact: facts.NodeJudged, at: float) -> None:
        recently_silent = {node for node, when in self._silent_at.items() if at - when < MANY_WINDOW_S}
        suspected = {node for one in core.state.gangs.values() for node in self._suspected_nodes(core, one, gang, at)}
        many = len(recently_silent | suspected | {fact.node})
        since = self._reachability.unreachable_since(COORDINATOR, gang.id, fact.node)
        waited_s = at - (self._world.schedule.now if since is None else since)
        known_nodes = max(len(core.state.nodes), len(gang.roster.members))
        require(
            many <= max(2, known_nodes // 10) or waited_s >= OUTAGE_HOLD_S,
            f"invariant 5: {fact.node} is called {fact.health} after {waited_s:.1f} s, and {many} of {known_nodes} "
            f"nodes are silent",
        )

    def _suspected_nodes(self, core: Core, gang: Gang, judged: Gang, at: float) -> set[str]:
        """Silent nodes of a gang that the core probed before this turn."""
        if gang.phase not in MONITORED:
            return set()
        seen = core.observed.gang(gang.id)
        silent_nodes = set()
        for node, since in seen.suspected_since.items():
            member, probe = gang.roster.members.get(node), seen.probes.get(node)
            # A node that this turn began to suspect was unknown to it when it decided.
            was_probed = since < at and (gang is judged or (probe is not None and probe.asked_at < at))
            silent = self._reachability.unreachable_since(COORDINATOR, gang.id, node) is not None
            silent = silent and not is_daemon_heard(core.observed.node(node), since, at)
            if was_probed and member is not None and not member.removed and silent:
                silent_nodes.add(node)
        return silent_nodes
