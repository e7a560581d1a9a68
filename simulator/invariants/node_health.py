"""Law 3: no fit node is taken on one witness's word; nobody is LOST while its gang makes progress, HUNG within 3 s."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.daemon.coordinator.core.core import Core
from muster.daemon.coordinator.core.state import facts
from muster.daemon.coordinator.core.state.durable_state import DurableState, Gang
from muster.daemon.coordinator.core.state.state_tables import SILENT, WATCHED, Phase, Verdict
from muster.simulator.coverage.transitions import TransitionRecorder
from muster.simulator.environment.machine import Machine
from muster.simulator.environment.network import COORDINATOR
from muster.simulator.ground_truth.progress import Progress
from muster.simulator.ground_truth.reachability import Reachability
from muster.simulator.invariants.violation import require

if TYPE_CHECKING:
    from muster.simulator.world.world import World

SHORTEST_PROBE_ROUND_S = 0.35
"""The shortest round of probes."""
MIN_HUNG_S = 3.0
"""Four seconds of probes find a node hung; a moment of life in between may have escaped them."""
UNKILLABLE_WINDOW_S = 15.0
"""A node is rightly called UNFIT for so long after ranks on it could not be killed."""


def gang_watching(state: DurableState, node: str) -> Gang | None:
    """A gang that asks after `node` when that falls silent."""
    return next((g for g in state.gangs.values() if node in g.members and g.phase in WATCHED), None)


class NodeHealthInvariant:
    """How often ranks have crashed on each node by themselves."""

    def __init__(
        self, world: World, reachability: Reachability, progress: Progress, transitions: TransitionRecorder
    ) -> None:
        self._world = world
        self._reachability = reachability
        self._progress = progress
        self._transitions = transitions
        self._crash_counts: dict[str, int] = {}

    def rank_crashed(self, node: str) -> None:
        """A rank has exited with an error that is its own, or its node's."""
        self._crash_counts[node] = self._crash_counts.get(node, 0) + 1

    def check_health_change(self, core: Core, fact: facts.NodeJudged, at: float) -> None:
        """A node is called something."""
        machine = self._world.machines[fact.node]  # nobody judges a name that no node has
        if fact.verdict is Verdict.UNFIT:
            self._check_unfit(core, machine, at)
        if fact.verdict in SILENT and (gang := gang_watching(core.state, fact.node)) is not None:
            self._check_witnesses(gang, fact)
            self._check_no_progress(gang, fact)
            self._check_hung_duration(gang, fact, at)

    def check_removal(self, fact: facts.MemberOut) -> None:
        """A gang goes on without a node."""
        agent = self._world.agents.get((fact.gang, fact.node))
        if fact.alive or agent is None:
            return
        ended = "has ended" in fact.reason
        require(
            "has not answered anybody" not in fact.reason
            or self._reachability.was_unreachable(COORDINATOR, fact.gang, fact.node),
            f"law 3: {fact.node} is out, for it answers nobody, and the coordinator could reach it",
        )
        require(
            not ended or not agent.alive or self._reachability.was_unreachable(COORDINATOR, fact.gang, fact.node),
            f"law 3: the agent on {fact.node} is said to have ended, and lives",
        )

    def _check_unfit(self, core: Core, machine: Machine, at: float) -> None:
        stuck = at - UNKILLABLE_WINDOW_S < machine.ranks_unkillable_until
        crashes = self._crash_counts.get(machine.name, 0) > 1
        may_be = machine.has_hardware_fault or stuck or crashes or self._has_unexplained_signal(core, machine.name)
        require(may_be, f"law 3: {machine.name} is called UNFIT, and is not")

    def _has_unexplained_signal(self, core: Core, node: str) -> bool:
        """It echoes a peer's loss that nobody looks for: the peer is out, or not missed, or its gang is not watched."""
        if node not in self._world.correlated_signals:
            return False
        id, dead = self._world.correlated_signals[node]
        gang = core.state.gangs[id]
        missed = dead in gang.members and not gang.members[dead].out and dead in core.observed.gang(id).suspected
        return gang.phase not in WATCHED or not missed

    def _check_witnesses(self, gang: Gang, fact: facts.NodeJudged) -> None:
        world, node = self._world, fact.node
        require(
            self._reachability.was_unreachable(COORDINATOR, gang.id, node),
            f"law 3: {node} is called {fact.verdict}, and the coordinator could reach it",
        )
        # Who is out, or never joined, is nobody's witness: nodes go out because they are no longer trusted.
        members = {m.node for m in gang.present()} - {node}
        others = [n for (id, n), a in world.agents.items() if id == gang.id and n in members and a.is_running()]
        blind = [n for n in others if self._reachability.was_unreachable(n, gang.id, node)]
        require(
            len(blind) >= min(2, len(others)),
            f"law 3: {node} is called {fact.verdict}; of {others} only {blind} may have found it silent",
        )

    def _check_no_progress(self, gang: Gang, fact: facts.NodeJudged) -> None:
        """Whoever was told of a new step within the shortest round of probes must not call anybody lost who lives."""
        agent = self._world.agents.get((gang.id, fact.node))
        if self._transitions.phase(gang.id) is Phase.RECOVERING or agent is None or not agent.alive:
            return  # closed connections prove an end at once, right after a step too
        ago = self._world.schedule.now - self._progress.reported_at(gang.id)
        require(
            ago > SHORTEST_PROBE_ROUND_S,
            f"law 3: {fact.node} is called {fact.verdict} {ago:.2f} s after a step of its gang",
        )

    def _check_hung_duration(self, gang: Gang, fact: facts.NodeJudged, at: float) -> None:
        mute = at - (self._reachability.unreachable_since(COORDINATOR, gang.id, fact.node) or 0.0)
        require(
            fact.verdict is not Verdict.HUNG or mute > MIN_HUNG_S,
            f"law 3: {fact.node} is called HUNG after {mute:.2f} s, and its kernel answers",
        )
