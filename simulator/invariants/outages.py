"""Law 5: while many nodes are silent at once nobody is evicted before a minute has passed.

The same goes for many nodes on which ranks can't be killed: what they wait for is none of these nodes' fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.detection.outage import LATE_S
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import Gang
from muster.daemon.coordinator.core.state.state_tables import FENCING, SILENT, WATCHED, Verdict
from muster.simulator.environment.network import COORDINATOR
from muster.simulator.ground_truth.reachability import Reachability
from muster.simulator.invariants.node_health import gang_watching
from muster.simulator.invariants.violation import require

if TYPE_CHECKING:
    from muster.simulator.world.world import World

OUTAGE_HOLD_S = 60.0
"""So long at least is waited for many nodes."""
MANY_WINDOW_S = 10.0
"""Who was called silent so lately counts among the many."""


class OutageInvariant:
    """When nodes were called silent, who is out of which gang, and when gangs were fenced last."""

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
        """A gang goes on without a node."""
        self._out.add((gang, node))

    def check_health_change(self, core: Core, fact: facts.NodeJudged, at: float) -> None:
        """A node is called something."""
        if fact.verdict is Verdict.UNFIT and "could not be killed" in fact.reason:
            self._check_unkillable(core, fact, at)
        if fact.verdict in SILENT:
            gang = gang_watching(core.state, fact.node)
            if gang is not None:
                self._check_silent(core, gang, fact, at)
            self._silent_at[fact.node] = at
        else:
            self._silent_at.pop(fact.node, None)

    def _check_unkillable(self, core: Core, fact: facts.NodeJudged, at: float) -> None:
        known, gangs = len(core.state.nodes), core.state.gangs
        held = max(at - self._fenced_at.get(g.id, at) for g in gangs.values() if fact.node in g.members)
        stuck = {fact.node}
        for (id, node), agent in self._world.agents.items():
            member = id in gangs and node in gangs[id].members and (id, node) not in self._out
            reached = agent.is_running() and not self._reachability.was_unreachable(COORDINATOR, id, node)
            # What ends by itself, the coordinator is not told of; and what is to end may take so long.
            late = member and gangs[id].phase in FENCING and at - self._fenced_at.get(id, at) > LATE_S
            if late and reached:
                stuck |= {node for rank in agent.ranks.values() if rank.alive and rank.kill_sent}
        require(
            len(stuck) <= max(2, known // 10) or held >= OUTAGE_HOLD_S,
            f"law 5: {fact.node} is called UNFIT after {held:.1f} s, and ranks on {sorted(stuck)} can't be killed",
        )

    def _check_silent(self, core: Core, gang: Gang, fact: facts.NodeJudged, at: float) -> None:
        lately = {node for node, when in self._silent_at.items() if at - when < MANY_WINDOW_S}
        suspected = {node for one in core.state.gangs.values() for node in self._suspected_nodes(core, one, gang, at)}
        many = len(lately | suspected | {fact.node})
        since = self._reachability.unreachable_since(COORDINATOR, gang.id, fact.node)
        held = at - (self._world.schedule.now if since is None else since)
        known = max(len(core.state.nodes), len(gang.members))
        require(
            many <= max(2, known // 10) or held >= OUTAGE_HOLD_S,
            f"law 5: {fact.node} is called {fact.verdict} after {held:.1f} s, and {many} of {known} nodes are silent",
        )

    def _suspected_nodes(self, core: Core, gang: Gang, judged: Gang, at: float) -> set[str]:
        """Nodes of a gang that are silent, and that somebody is being asked after."""
        if gang.phase not in WATCHED:
            return set()
        seen = core.observed.gang(gang.id)
        missed = set()
        for node, since in seen.suspected.items():
            member, probe = gang.members.get(node), seen.probes.get(node)
            # Whom this very turn began to suspect, it did not know of when it judged.
            known = since < at and (gang is judged or (probe is not None and probe.asked_at < at))
            silent = self._reachability.unreachable_since(COORDINATOR, gang.id, node) is not None
            if known and member is not None and not member.out and silent:
                missed.add(node)
        return missed
